"""What a lost replica costs a run, and what watching its processes costs.

    python -m benchmarks.recovery [--replicas 3] [--repeats 3] [--seconds 60] [--wait-s 0.05]

Each run trains alphabet sort (S = 2) with all replicas for ``--seconds``. Then one is killed or
stopped (SIGSTOP), and the run goes on until it has been back for as long; or it is killed and stays
away (``generator.max_restarts`` 0). Tokens per second are those sampled between two moments,
against the time before the fault. Each step of an engine waits ``--wait-s`` without using a core,
as one on a device does: otherwise the others would get the cores of the one that is gone. The
learning rate is next to nothing: a policy that learns changes the length of its answers by more
than what is measured.

The watch is measured in this process: the processor time of `Processes.wait_until_lost` for as many
processes as the run has, by the time that passed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.options import at_least
from benchmarks.report import heading, medians, print_table, write_report
from tests.support.waiting_engines import environment
from torchtitan_rl.commands.chaos import disturb, processes_of
from torchtitan_rl.errors import OutputError
from torchtitan_rl.observability.failures import read_failures
from torchtitan_rl.observability.sinks import Row, read_rows
from torchtitan_rl.processes import Processes

_PATIENCE_S = 300.0
_KINDS = ("kill", "stop", "kill for good")


def main() -> None:
    options = _options()
    report: dict[str, Any] = heading(options)
    report["watch"] = _watch(options.replicas + 2, options.seconds)
    report["faults"] = {kind: [] for kind in _KINDS}
    for repeat in range(options.repeats):
        for kind in _KINDS:
            report["faults"][kind].append(_measure(options, kind))
            print(f"repeat {repeat}, {kind}: {report['faults'][kind][-1]}", flush=True)
            write_report(options.output, report)
    report["medians"] = {kind: medians(rows) for kind, rows in report["faults"].items()}
    write_report(options.output, report)
    rows = report["medians"].values()
    names = dict.fromkeys(name for row in rows for name in row)
    cells = [[name, *(f"{row[name]:.2f}" if name in row else "" for row in rows)] for name in names]
    print_table(["", *_KINDS], cells)
    print(f"watching {options.replicas + 2} processes: {report['watch']:.3%} of a core")


def _measure(options: argparse.Namespace, kind: str) -> dict[str, float]:
    is_for_good = kind == "kill for good"
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        command = [
            *(sys.executable, "-m", "torchtitan_rl.commands.cli", "train", "alphabet_sort_tiny"),
            *("--output-dir", folder, "--name", "run", "--num-steps", "100000"),
            *("--rollout.groups-per-step", "8", "--rollout.group-size", "4"),
            *("--evaluation.every", "0", "--evaluation.num-problems", "4"),
            *("--schedule.staleness", "2", "--generator.replicas", f"{options.replicas}"),
            *("--generator.max-running-requests", "8"),
            *("--trainer.optimizer.learning-rate", "1e-9"),
            *(("--generator.max-restarts", "0") if is_for_good else ()),
        ]
        waiting = environment(Path(folder), options.wait_s)
        with log.open("w") as output:
            run = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | waiting)
        try:
            _until(lambda: len(_rows(run_dir)) > 5, run)
            began_s = time.time()
            time.sleep(options.seconds)
            lost_s = time.time()
            lost = processes_of(run_dir, "replica")["replica1-rank0"]
            disturb(lost, "stop" if kind == "stop" else "kill", "replica")
            _until(lambda: bool(_failures(run_dir)), run)
            failure = _failures(run_dir)[0]
            goes_on_s = failure["wall_time_s"]
            time.sleep(options.seconds)
            before = _rate(run_dir, began_s, lost_s)
            ratio = _rate(run_dir, goes_on_s, time.time()) / before
            if is_for_good:
                return {"tokens/s before": before, "while it is gone": ratio}
            return {
                "tokens/s before": before,
                "after its return": ratio,
                "s until seen": goes_on_s - failure["serve_s"] - lost_s,
                "s until serving": goes_on_s - lost_s,
                "tokens again": failure["tokens_again"],
            }
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait(_PATIENCE_S)


def _rows(run_dir: Path) -> list[Row]:
    with suppress(OSError, ValueError):
        return [line.row for line in read_rows(run_dir / "metrics.jsonl")]
    return []


def _failures(run_dir: Path) -> list[Row]:
    with suppress(OutputError):
        return read_failures(run_dir)
    return []


def _rate(run_dir: Path, begin_s: float, end_s: float) -> float:
    """Sampled tokens per second, between the first and the last step that ended in this time."""
    rows = [row for row in _rows(run_dir) if "total/tokens_generated" in row]
    rows = [row for row in rows if begin_s <= row["wall_time_s"] <= end_s]
    tokens, seconds = (
        rows[-1][name] - rows[0][name] for name in ("total/tokens_generated", "wall_time_s")
    )
    return float(tokens / seconds)


def _until(holds: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not holds():
        if run.poll() is not None or time.monotonic() > end_s:
            raise SystemExit("the run did not get on; see its log")
        time.sleep(0.1)


def _watch(number: int, seconds: float) -> float:
    """Processor time by time that passed."""
    programs = [subprocess.Popen(["sleep", f"{10 * seconds}"]) for _ in range(number)]

    async def watch() -> None:
        watched = Processes(program.pid for program in programs)
        with suppress(TimeoutError):
            await asyncio.wait_for(watched.wait_until_lost("programs"), seconds)
        await watched.end(0.0)

    began_s, used_s = time.perf_counter(), time.process_time()
    asyncio.run(watch())
    share = (time.process_time() - used_s) / (time.perf_counter() - began_s)
    for program in programs:
        program.wait()
    return share


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=at_least(2), default=3)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--seconds", type=at_least(5), default=60, help="before and after a fault")
    parser.add_argument("--wait-s", type=float, default=0.05, help="of each step of an engine")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/recovery.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
