"""Compares tokens per second of our endpoint with those of vLLM's own server.

    python -m benchmarks.serving [--repeats 5] [--requests 256] [--modes whole ...] [--json FILE]

Both servers have the same model, engine flags and cores (for all their processes), and run all the
time. They get the same requests alternately, 64 at a time: chats, Responses and Messages, whole and
streamed. The served copy of the model has no end-of-sequence token. So every answer has exactly as
many tokens as its request asks for, and both sides do the same work, with one exception: our side
keeps each response of `/v1/responses`, and vLLM does not. CPU seconds are those of all processes of
a side. The process that sends the requests runs on the same cores; its CPU seconds are reported
separately. Figures are medians over the repeats. Ratios are medians of the repeats' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import numpy as np

from benchmarks.options import at_least
from benchmarks.plots import figure
from benchmarks.report import heading, medians, print_table, write_report
from benchmarks.servers import EngineFlags, Server, ours, own
from benchmarks.training_runs import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    path: str
    streams: bool
    messages: str = "messages"  # the names of the request's fields
    max_tokens: str = "max_tokens"


MODES = {
    f"{api}{how}": Mode(path=path, streams=streams, **names)
    for api, path, names in (
        ("", "/v1/chat/completions", {}),
        (
            "responses, ",
            "/v1/responses",
            {"messages": "input", "max_tokens": "max_output_tokens"},
        ),
        ("messages, ", "/v1/messages", {}),
    )
    for how, streams in (("whole", False), ("streaming", True))
}
TINY = ROOT / "experiments" / "alphabet_sort" / "policy"
_LOAD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of one side under one load. Times are in seconds; ``cpu_s`` has them by
    process."""

    tokens: int
    seconds: float
    load_cpu_s: float
    cpu_s: dict[str, float]
    latency_p50: float
    latency_p99: float
    first_p50: float
    first_p99: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms_per_token(self) -> float:
        return 1000 * sum(self.cpu_s.values()) / self.tokens


def bodies(count: int, *, mode: Mode, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    """Make requests: chats of one to three messages, and completions of log-normal lengths with a
    median of 96 tokens."""
    rng = random.Random(seed)
    more: dict[str, Any] = {"stream": True} if mode.streams else {}
    if mode == MODES["streaming"]:
        more["stream_options"] = {"include_usage": True}
    return [
        {
            "model": "policy",
            mode.messages: _messages(rng),
            mode.max_tokens: max(8, min(max_tokens, round(rng.lognormvariate(4.56, 0.6)))),
            "temperature": 1.0,
            **more,
        }
        for _ in range(count)
    ]


def _messages(rng: random.Random) -> list[dict[str, str]]:
    names = [
        rng.choice("ABCDEFGHKLMNRST") + "".join(rng.choices("aeiourlnst", k=5)) for _ in "ab" * 8
    ]
    words = " ".join(names[: rng.randint(4, 16)])
    messages = [{"role": "user", "content": f"Sort these names: {words}"}]
    if rng.random() < 0.5:
        messages += [
            {"role": "assistant", "content": " ".join(sorted(words.split()))},
            {"role": "user", "content": "Now the other way round."},
        ]
    return messages


def endless(model: Path, folder: Path) -> Path:
    """Make a copy of a model without an end-of-sequence token."""
    copy = Path(shutil.copytree(model, folder / "model"))
    for name, field in (
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "eos_token"),
    ):
        settings = json.loads((copy / name).read_text())
        settings[field] = None
        (copy / name).write_text(json.dumps(settings))
    return copy


def measure(
    server: Server, load: list[dict[str, Any]], concurrency: int, *, mode: Mode
) -> Measured:
    """Measure one side. Raises SystemExit if the load fails, or if the answers do not have the
    requested number of tokens."""
    before = server.cpu_seconds()
    job = {
        "host": "127.0.0.1",
        "port": server.port,
        "path": mode.path,
        "bodies": load,
        "concurrency": concurrency,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chat_load"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=_LOAD_TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(f"{server.name}: the load failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout)
    after = server.cpu_seconds()
    tokens = sum(timing["tokens"] for timing in result["timings"])
    asked = sum(body[mode.max_tokens] for body in load)
    if tokens != asked:
        raise SystemExit(f"{server.name} answered {tokens} tokens of {asked}")
    total = [timing["total_s"] for timing in result["timings"]]
    first = [timing["first_s"] for timing in result["timings"]]
    return Measured(
        tokens=tokens,
        seconds=result["seconds"],
        load_cpu_s=result["cpu_s"],
        cpu_s={name: value - before.get(name, 0.0) for name, value in after.items()},
        latency_p50=float(np.percentile(total, 50)),
        latency_p99=float(np.percentile(total, 99)),
        first_p50=float(np.percentile(first, 50)),
        first_p99=float(np.percentile(first, 99)),
    )


def compare(
    sides: Sequence[Server],
    modes: Sequence[str],
    *,
    repeats: int,
    requests: int,
    concurrency: int,
    max_tokens: int,
) -> dict[str, dict[str, list[Measured]]]:
    """Measure all sides. Returns the results by mode and side. Each repeat begins with another
    side, and has its own requests."""
    results: dict[str, dict[str, list[Measured]]] = {
        mode: {side.name: [] for side in sides} for mode in modes
    }
    for name in modes:
        mode = MODES[name]
        warm_up = bodies(concurrency, mode=mode, seed=-1, max_tokens=32)
        for side in sides:
            measure(side, warm_up, concurrency, mode=mode)
        for repeat in range(repeats):
            load = bodies(requests, mode=mode, seed=repeat, max_tokens=max_tokens)
            start = repeat % len(sides)
            for side in (*sides[start:], *sides[:start]):
                measured = measure(side, load, concurrency, mode=mode)
                results[name][side.name].append(measured)
                print(
                    f"{name} {repeat} {side.name}: {measured.tokens_per_second:.0f} tok/s, "
                    f"{measured.cpu_ms_per_token:.3f} CPU ms/token",
                    flush=True,
                )
    return results


def ratio(ours_: Sequence[Measured], own_: Sequence[Measured], figure: str) -> float:
    pairs = zip(ours_, own_, strict=True)
    return median(getattr(a, figure) / getattr(b, figure) for a, b in pairs)


def report(
    results: dict[str, dict[str, list[Measured]]], settings: dict[str, Any], path: Path
) -> None:
    """Print and write the results. ``settings``: the report's heading."""
    rows, summary = [], {}
    for mode, of_mode in results.items():
        (_, ours_), *others = of_mode.items()
        for name, runs in of_mode.items():
            rows.append([f"{mode}: {name}", *_cells(runs)])
        for name, runs in others:
            summary[f"{mode}, over {name}"] = {
                "tokens_per_second": ratio(ours_, runs, "tokens_per_second"),
                "cpu_per_token": ratio(ours_, runs, "cpu_ms_per_token"),
                "latency_p50": ratio(ours_, runs, "latency_p50"),
                "latency_p99": ratio(ours_, runs, "latency_p99"),
            }
    print()
    header = ["", "tok/s", "CPU ms/tok", "p50 s", "p99 s", "first p50 s", "first p99 s", "load CPU"]
    print_table(header, rows)
    print()
    print_table(
        ["ours over the other", "tok/s", "CPU/token", "p50", "p99"],
        [
            [name, *(f"{value:.3f}" for value in figures.values())]
            for name, figures in summary.items()
        ],
    )
    write_report(
        path,
        settings
        | {
            "ratios": summary,
            "medians": {
                mode: {name: _medians(runs) for name, runs in of_mode.items()}
                for mode, of_mode in results.items()
            },
            "repeats": {
                mode: {name: [asdict(one) for one in runs] for name, runs in of_mode.items()}
                for mode, of_mode in results.items()
            },
        },
    )


def _medians(runs: Sequence[Measured]) -> dict[str, float]:
    times = ("latency_p50", "latency_p99", "first_p50", "first_p99")
    names = ("tokens", "tokens_per_second", "cpu_ms_per_token", *times)
    return medians([{name: getattr(run, name) for name in names} for run in runs])


def _cells(runs: Sequence[Measured]) -> list[str]:
    _, per_second, cpu_ms, *times = _medians(runs).values()
    load_share = median(run.load_cpu_s / run.seconds for run in runs)
    cells = (f"{seconds:.2f}" for seconds in times)
    return [f"{per_second:.0f}", f"{cpu_ms:.3f}", *cells, f"{load_share:.0%}"]


def draw(results: dict[str, dict[str, list[Measured]]], path: Path) -> None:
    figures = {
        "tokens per second": "tokens_per_second",
        "CPU ms per token": "cpu_ms_per_token",
        "p99 latency, s": "latency_p99",
    }
    with figure(path, size=(4 * len(figures), 4), columns=len(figures)) as axes:
        for axis, (title, name) in zip(axes, figures.items(), strict=True):
            for i, of_mode in enumerate(results.values()):
                for j, (side, runs) in enumerate(of_mode.items()):
                    values = [getattr(run, name) for run in runs]
                    place = i + 0.35 * (j - (len(of_mode) - 1) / 2)
                    label = side if i == 0 else None
                    axis.bar(place, median(values), 0.3, color=f"C{j}", alpha=0.6, label=label)
                    axis.plot([place] * len(values), values, "k.", markersize=4)
            names = [mode.replace(", ", "\n") for mode in results]
            axis.set(title=title, xticks=range(len(results)))
            axis.set_xticklabels(names, fontsize=7)
        axes[0].legend(loc="lower left", fontsize=8)
    print(f"drawn to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY, help="a Hugging Face directory")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--requests", type=int, default=256, help="in each repeat")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=384, help="of the longest completion")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-cache-bytes", type=int, default=256 << 20)
    parser.add_argument("--replicas", type=int, default=1, help="of ours")
    parser.add_argument("--cores", default="", help="of each side, such as 0,1; all of them")
    parser.add_argument(
        "--defaults", action="store_true", help="also vLLM's server with its own scheduling"
    )
    parser.add_argument("--json", type=Path, default=Path("outputs/serving.json"))
    parser.add_argument("--plot", type=Path, default=Path("outputs/serving.png"))
    given = parser.parse_args()
    cores = [int(core) for core in given.cores.split(",") if core] or sorted(
        os.sched_getaffinity(0)
    )
    settings, folder = heading(given), Path(mkdtemp(prefix="serving-"))
    flags = EngineFlags(
        model=endless(given.model, folder),
        max_model_len=given.max_model_len,
        max_running_requests=max(128, given.concurrency),
        kv_cache_bytes=given.kv_cache_bytes,
    )
    sides = [
        ours(flags, cores=cores, replicas=given.replicas, folder=folder),
        own(flags, cores=cores, folder=folder),
    ]
    if given.defaults:
        more = ("--async-scheduling", "--enable-chunked-prefill")
        sides.append(own(flags, cores=cores, folder=folder, more=more))
        sides[-1].name, sides[-1].log = "the same, its own scheduling", folder / "defaults.log"
    try:
        for side in sides:
            side.start()
        for side in sides:
            side.wait_until_ready()
        results = compare(
            sides,
            given.modes,
            repeats=given.repeats,
            requests=given.requests,
            concurrency=given.concurrency,
            max_tokens=given.max_tokens,
        )
    finally:
        for side in sides:
            side.stop()
    commands = {side.name: list(side.command) for side in sides}
    settings["options"] |= {"cores": cores, "commands": commands}
    report(results, settings, given.json)
    draw(results, given.plot)


if __name__ == "__main__":
    main()
