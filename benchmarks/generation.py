"""Compares synchronous with continuous batching, and our engine loop with the limit.

    python -m benchmarks.generation [--rollouts 256] [--turns 3] [--repeats 5] [--policy DIR]

The sides are measured alternately. Each has its own processes, all on the same cores (`--cores`):

- one: our engine loop, one blocking call after another (on a sixteenth of the rollouts);
- rounds: synchronous batching; all turns of a round start together and wait for the slowest;
- loop: our continuous-batching engine loop;
- router: the engine loop in a Monarch replica, called through `GeneratorRouter`; two processes;
- AsyncLLM: vLLM's `AsyncLLM`; two processes;
- offline: vLLM's `LLM.generate` with all prompts known in advance; only on single-turn workloads.

All sides run the same requests with the same engine settings. Environments take an exponentially
distributed time after each turn (`--delay-s`). The first distribution is also run without these
delays, once with several turns and once with one. `step_model.py` computes the least time that a
workload can take.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generation_sides import (
    MAX_MODEL_LEN,
    EngineSettings,
    SideResult,
    build_async_llm,
    build_loop,
    build_monarch,
    build_offline,
)
from benchmarks.options import at_least, core
from benchmarks.plots import bars
from benchmarks.report import heading, print_table, write_report
from benchmarks.step_model import fit, least_seconds
from benchmarks.workers import Side, Worker
from benchmarks.workload import Workload, draw_workload
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR

WAYS = {  # side -> (worker, way to run a workload)
    "one": ("loop", "one"),
    "rounds": ("loop", "rounds"),
    "loop": ("loop", "all"),
    "router": ("router", "all"),
    "AsyncLLM": ("AsyncLLM", "all"),
    "offline": ("offline", "offline"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    side: str
    result: SideResult
    cpu_s: float

    @property
    def tokens_per_second(self) -> float:
        return self.result.timing.num_tokens / self.result.timing.seconds

    @property
    def outside_share(self) -> float | None:
        """The share of the time with requests that was spent neither in the engine's steps nor in
        passing requests to the engine."""
        if not self.result.steps:
            return None
        inside_s = sum(s.seconds + s.adding_s for s in self.result.steps)
        timing = self.result.timing
        return 1.0 - inside_s / (timing.seconds - timing.waiting_s)

    @property
    def mean_batch(self) -> float | None:
        """Mean number of tokens in a step."""
        steps = self.result.steps
        return sum(s.tokens for s in steps) / len(steps) if steps else None


def main() -> None:
    options = _options()
    policy = with_room(options.policy, MAX_MODEL_LEN)
    settings = EngineSettings(
        policy=str(policy),
        max_running=options.max_running,
        device=options.device,
        threads=len(options.cores),
    )
    report = heading(options)
    workloads: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        workers = _workers(stack, settings, tuple(options.cores), options.sides)
        _warm_up(workers)
        for name, workload in _workloads(options).items():
            measured = _measure(workers, workload, options)
            workloads[name] = _summarize(name, workload, measured, options)
    first = next(iter(workloads))
    bars(
        options.output.with_suffix(".png"),
        {side: row["tokens_per_second"] for side, row in workloads[first]["sides"].items()},
        title=f"{options.rollouts} rollouts, {first}, at most {options.max_running} running",
        label="tokens/s",
    )
    write_report(options.output, report | {"workloads": workloads})


def _workloads(options: argparse.Namespace) -> dict[str, Workload]:
    """The workloads by name, with and without delays of the environments (see the module)."""
    first = options.distributions[0]
    drawn = [(name, options.turns, options.delay_s) for name in options.distributions]
    drawn += [(first, options.turns, 0.0), (first, 1, 0.0)]
    workloads = {}
    for name, turns, delay_s in drawn:
        title = f"{name}, {turns} turn{'s' if turns > 1 else ''}"
        if turns > 1 and delay_s == 0.0:
            title += ", no delays"
        workloads[title] = draw_workload(
            name, rollouts=options.rollouts, turns=turns, delay_s=delay_s
        )
    return workloads


def with_room(policy: Path, max_model_len: int) -> Path:
    """The policy, or a copy of it whose configuration allows ``max_model_len`` positions. The
    content of the answers does not matter here, and rotary embeddings work at any position."""
    config = json.loads((policy / "config.json").read_text())
    if config["max_position_embeddings"] >= max_model_len:
        return policy
    copy = Path(tempfile.mkdtemp(prefix="policy-")) / policy.name
    shutil.copytree(policy, copy)
    config["max_position_embeddings"] = max_model_len
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def _workers(
    stack: contextlib.ExitStack,
    settings: EngineSettings,
    cores: tuple[int, ...],
    sides: Sequence[str],
) -> dict[str, Worker]:
    environment = engine_environment(
        settings.threads, "cuda" if settings.device == "cuda" else "cpu"
    )
    builds: dict[str, tuple[Callable[..., Side], tuple[Any, ...], dict[str, str]]] = {
        "loop": (build_loop, (), {}),
        "router": (build_monarch, (tempfile.mkdtemp(prefix="generation-"),), {}),
        "AsyncLLM": (build_async_llm, (), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
        "offline": (build_offline, (), {}),
    }
    wanted = dict.fromkeys(WAYS[side][0] for side in sides)
    workers = {}
    for name in wanted:
        build, args, more = builds[name]
        worker = Worker(
            build,
            settings,
            *args,
            cores=cores,
            environment=environment | more,
            is_stopped_between=name != "router",
        )
        workers[name] = stack.enter_context(worker)
    for worker in workers.values():
        worker.wait_until_built()
    return workers


def _warm_up(workers: Mapping[str, Worker]) -> None:
    workload = draw_workload("uniform", rollouts=16, turns=1, seed=1)
    for name, worker in workers.items():
        worker.call("offline" if name == "offline" else "all", workload)


def _measure(
    workers: Mapping[str, Worker], workload: Workload, options: argparse.Namespace
) -> list[Measurement]:
    is_single_turn = len(workload.rollouts[0].turns) == 1
    measured = []
    for _ in range(options.repeats):
        for side in options.sides:
            if side == "offline" and not is_single_turn:
                continue
            worker, way = WAYS[side]
            given = workload
            if side == "one":
                given = dataclasses.replace(
                    workload, rollouts=workload.rollouts[: max(1, len(workload.rollouts) // 16)]
                )
            result, cpu_s = workers[worker].call(way, given)
            measured.append(Measurement(side=side, result=result, cpu_s=cpu_s))
    return measured


def _summarize(
    name: str, workload: Workload, measured: Sequence[Measurement], options: argparse.Namespace
) -> dict[str, Any]:
    by_side = {
        side: [m for m in measured if m.side == side]
        for side in dict.fromkeys(m.side for m in measured)
    }
    sides = {side: _medians(repeats) for side, repeats in by_side.items()}
    summary: dict[str, Any] = {"sampled_tokens": workload.num_sampled, "sides": sides}
    print(f"\n{name}: {workload.num_sampled} tokens, longest rollout {workload.longest_rollout}")
    if "loop" in by_side:
        samples = [s for m in by_side["loop"] for s in m.result.steps]
        model = fit(samples)
        of_one_run = by_side["loop"][0].result.steps
        least_s = least_seconds(workload, model, of_one_run, max_running=options.max_running)
        summary["step_model"] = dataclasses.asdict(model)
        summary["bound_tokens_per_second"] = bound = workload.num_sampled / least_s
        print(
            f"a step: {model.base * 1e3:.2f} ms + {model.per_token * 1e3:.3f} ms a token "
            f"+ {model.per_prompt_token * 1e3:.3f} ms a prompt token "
            f"+ {model.per_kv_use * 1e3:.2f} ms x cache use (error {model.error:.0%}); "
            f"bound {bound:,.0f} tokens/s"
        )
        loop = sides["loop"]["tokens_per_second"]
        summary["ratios"] = {
            f"loop / {side}": loop / row["tokens_per_second"] for side, row in sides.items()
        } | {f"{side} / bound": row["tokens_per_second"] / bound for side, row in sides.items()}
    _print(sides, summary.get("ratios", {}))
    return summary


def _medians(repeats: Sequence[Measurement]) -> dict[str, Any]:
    latencies = [np.percentile(m.result.timing.latencies_s or (0.0,), (50, 99)) for m in repeats]
    p50, p99 = np.median(latencies, axis=0)
    outside = [m.outside_share for m in repeats if m.outside_share is not None]
    batch = [m.mean_batch for m in repeats if m.mean_batch is not None]
    return {
        "sampled_tokens": repeats[0].result.timing.num_tokens,
        "seconds": [m.result.timing.seconds for m in repeats],
        "tokens_per_second": statistics.median(m.tokens_per_second for m in repeats),
        "cpu_us_per_token": statistics.median(
            1e6 * m.cpu_s / m.result.timing.num_tokens for m in repeats
        ),
        "latency_p50_s": float(p50),
        "latency_p99_s": float(p99),
        "outside_share": statistics.median(outside) if outside else None,
        "mean_batch": statistics.median(batch) if batch else None,
    }


def _print(sides: Mapping[str, Mapping[str, Any]], ratios: Mapping[str, float]) -> None:
    def optional(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            side,
            f"{row['tokens_per_second']:,.0f}",
            optional(ratios.get(f"loop / {side}"), ".2f"),
            f"{row['cpu_us_per_token']:.0f}",
            optional(row["mean_batch"], ".1f"),
            optional(row["outside_share"], ".1%"),
            f"{row['latency_p50_s']:.2f}" if row["latency_p99_s"] else "-",
            f"{row['latency_p99_s']:.2f}" if row["latency_p99_s"] else "-",
        ]
        for side, row in sides.items()
    ]
    header = ["side", "tokens/s", "loop / it", "CPU us/token", "batch", "outside", "p50 s", "p99 s"]
    print_table(header, rows)
    if "loop / bound" in ratios:
        print(", ".join(f"{side} / bound {ratios[f'{side} / bound']:.3f}" for side in sides))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=Path, default=POLICY_DIR)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--delay-s", type=float, default=0.1, help="mean environment delay")
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument(
        "--distributions", nargs="+", default=["pareto", "lognormal", "uniform"], metavar="NAME"
    )
    parser.add_argument("--sides", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument(
        "--cores",
        nargs="+",
        type=core,
        default=[max(os.sched_getaffinity(0))],
        metavar="CORE",
        help="of each side; the engines compute with as many threads",
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/generation.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
