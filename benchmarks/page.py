"""What serving the page of a run costs the run, with one reader.

    python -m benchmarks.page [--config NAME] [--steps 160] [--block 8]

One run with ``--page``. In every other block of steps a reader has the page open: it listens to the
events, and after each change asks for what one view asks for (in turn the overview, what runs now,
the rollouts, the curves). In the blocks between, the page's process is stopped. So both sides
alternate under the same conditions. The first step of each block is left out.

Two figures say what the page costs: the ratio of throughputs, with its standard error, and the CPU
time of the page's process as a share of what the run's cores could do in that time. The second is
exact, and is at least the loss of a run that uses all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import psutil

from benchmarks.options import at_least
from benchmarks.report import heading, write_report

_VIEWS = (
    "overview",
    "now",
    "rollouts?limit=100&sort=-step",
    "metrics?names=train/reward_mean,evaluation/reward_mean,trainer/entropy,trainer/grad_norm,"
    "train/response_length_mean,tokens/generated_per_second,time/step_s,policy/staleness_mean",
)
_RATE = "tokens/generated_per_second"
_POLL_S = 0.05


class Reader(threading.Thread):
    """Has the page open while `is_on` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.is_on = threading.Event()
        self.answer_s: list[float] = []

    def run(self) -> None:
        while True:
            self.is_on.wait()
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self._url}api/events", timeout=30) as events,
            ):
                for line in events:
                    if not self.is_on.is_set():
                        break
                    if line.startswith(b"data:"):
                        self._ask()

    def _ask(self) -> None:
        view = _VIEWS[len(self.answer_s) % len(_VIEWS)]
        start_s = time.perf_counter()
        urllib.request.urlopen(f"{self._url}api/runs/0/{view}", timeout=30).read()
        self.answer_s.append(time.perf_counter() - start_s)


def main() -> None:
    options = _options()
    report = heading(options)
    folder = Path(mkdtemp(prefix="page-"))
    command = [sys.executable, "-m", "torchtitan_rl.commands.cli", "train", options.config]
    command += ["--num-steps", str(options.steps), "--output-dir", str(folder), "--name", "run"]
    command += ["--evaluation.num-problems", "0", "--checkpoint.every", "0", "--page"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        found = re.search(r"page (http://\S+)", run.stdout.readline())
        assert found is not None
        threading.Thread(target=run.stdout.read, daemon=True).start()
        page = next(
            one
            for one in psutil.Process(run.pid).children()
            if "torchtitan_rl.commands.view" in one.cmdline()
        )
        reader = Reader(found[1])
        reader.start()
        cpu_s, wall_s = _alternate(run, page, reader, folder / "run", options.block)
    rates = _rates(folder / "run" / "metrics.jsonl", options.block)
    result = _compared(rates) | {
        "page_cpu_share": cpu_s / (wall_s * len(os.sched_getaffinity(0))),
        "answers": len(reader.answer_s),
        "answer_ms": 1e3 * statistics.median(reader.answer_s),
    }
    print(json.dumps(result, indent=1))
    write_report(options.output, report | {"result": result, "tokens_per_s": rates})


def _alternate(
    run: subprocess.Popen[str], page: psutil.Process, reader: Reader, run_dir: Path, block: int
) -> tuple[float, float]:
    """Switch the page at each block. Returns its CPU seconds and the wall time while it was on."""
    cpu_s = wall_s = 0.0
    is_on, since_s, before_s = True, time.monotonic(), _cpu_s(page)
    while run.poll() is None:
        wanted = _is_on(_last_step(run_dir) + 1, block)
        if wanted != is_on:
            is_on, now_s = wanted, time.monotonic()
            if is_on:
                page.send_signal(signal.SIGCONT)
                since_s, before_s = now_s, _cpu_s(page)
                reader.is_on.set()
            else:
                reader.is_on.clear()
                if reader.answer_s:
                    wall_s += now_s - since_s
                    cpu_s += _cpu_s(page) - before_s
                page.send_signal(signal.SIGSTOP)
        time.sleep(_POLL_S)
    return cpu_s, wall_s


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _is_on(step: int, block: int) -> bool:
    return step > 1 and (step - 1) // block % 2 == 1


def _last_step(run_dir: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(json.loads((run_dir / "metrics.jsonl").read_bytes().splitlines()[-1])["step"])
    return 0


def _rates(metrics: Path, block: int) -> dict[str, list[list[float]]]:
    """Tokens per second of the steps of each whole block, without its first step."""
    rates: dict[str, dict[int, list[float]]] = {"off": {}, "on": {}}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        step = row["step"]
        if row["kind"] == "step" and (step - 1) % block:
            side = "on" if _is_on(step, block) else "off"
            rates[side].setdefault((step - 1) // block, []).append(row[_RATE])
    return {side: list(blocks.values())[side == "off" :] for side, blocks in rates.items()}


def _compared(rates: dict[str, list[list[float]]]) -> dict[str, float]:
    """The throughput with the page by the throughput without it, from each pair of blocks."""
    pairs = zip(rates["on"], rates["off"], strict=False)
    ratios = [_mean(on) / _mean(off) for on, off in pairs]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    return {
        "pairs": len(ratios),
        "throughput_ratio": statistics.mean(ratios),
        "throughput_ratio_median": statistics.median(ratios),
        "standard_error": error,
    }


def _mean(rates: Sequence[float]) -> float:
    return statistics.harmonic_mean(rates)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="page.py", description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="alphabet_sort_tiny")
    parser.add_argument("--steps", type=at_least(8), default=160)
    parser.add_argument("--block", type=at_least(2), default=8, help="steps of a block")
    default = Path(__file__).with_name("results") / "page.json"
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
