"""Compares fixed numbers of rollouts that run at the same time with `schedule.max_rollouts auto`.

    python -m benchmarks.in_flight [--engines simulated cpu] [--numbers 16 32 ...] [--repeats 3]

Rollouts of several turns wait for places (`rollout/places.py`), and their requests go through the
real router to replicas whose KV cache is too small for all of them: simulated ones, which preempt
as vLLM does (`kv_replica.py`), or vLLM on the CPU. Each run rolls out the same workload; the
variants alternate. The number that follows the caches begins at a fourth of the requests that an
engine decodes at most (``--max-running``), as in a training run.

Tokens per second are those that the engines sampled between the ends of the first and of the last
sixth of the rollouts; ``whole`` is the mean over the whole run, with its start and its end. On a
machine that others use too, the tokens for each second of the engine's CPU time scatter less.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.generation import with_room
from benchmarks.generation_sides import EngineSettings, monarch_replica
from benchmarks.kv_replica import KvReplica, KvSpeeds
from benchmarks.options import at_least
from benchmarks.report import heading, medians, print_table, write_report
from benchmarks.workload import PlannedRollout, Workload, draw_workload, request_of
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.aio import background
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.observability.engine import EngineSampler
from torchtitan_rl.rollout.places import Places
from torchtitan_rl.routing.router import GeneratorRouter

AUTOMATIC = "automatic"
_WORKLOADS = {"one turn": {"turns": 1}, "three turns": {"turns": 3, "delay_s": 1.0}}
_MARGIN = 6  # one in so many rollouts, at each end of a run, is not counted


def main() -> None:
    options = _options()
    report: dict[str, Any] = heading(options)
    for engine in options.engines:
        with tempfile.TemporaryDirectory() as folder:
            work = _measure(engine, options, Path(folder))
            report[engine] = run_virtually(work) if engine == "simulated" else asyncio.run(work)
    write_report(options.output, report)


async def _measure(engine: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    variants: dict[str, int | None] = {str(number): number for number in options.numbers}
    variants[AUTOMATIC] = None
    measured: dict[str, Any] = {}
    async with _replicas(engine, options, folder) as new_router:
        for name in options.workloads:
            kind = _WORKLOADS[name]
            repeats: dict[str, list[dict[str, float]]] = {one: [] for one in variants}
            for repeat in range(options.repeats):
                workload = draw_workload(
                    "lognormal", rollouts=options.rollouts, seed=repeat, **kind
                )
                for variant, fixed in variants.items():
                    router = new_router()
                    places = Places(
                        fixed,
                        at_first=options.max_running // 4,
                        num_replicas=len(router.unreserved()),
                    )
                    repeats[variant].append(await run(router, workload, places))
            measured[name] = _summary(repeats)
            _print(f"{engine}, {name}", measured[name])
    return measured


async def run(router: GeneratorRouter, workload: Workload, places: Places) -> dict[str, float]:
    """Run the workload, with as many rollouts at the same time as there are ``places``."""
    now_s = asyncio.get_running_loop().time
    num_ended = 0
    counted: list[tuple[float, int]] = []  # time and sampled tokens at the ends of the margin
    margin = len(workload.rollouts) // _MARGIN
    limits: list[int] = []
    readings: list[tuple[float, float]] = []  # use of the caches, and requests in queues

    def observe(stats: Any) -> None:
        places.observe(stats, router.unreserved())
        limits.append(places.limit)
        if margin <= num_ended < len(workload.rollouts) - margin:
            use = statistics.fmean(one.kv_use for one in stats.values())
            readings.append((use, sum(one.waiting for one in stats.values())))

    async def roll_out(rollout: PlannedRollout) -> None:
        nonlocal num_ended
        history: tuple[int, ...] = ()
        async with places.take():
            for number, turn in enumerate(rollout.turns):
                request = request_of(rollout, number, history)
                done = await router.generate(request)
                history = request.prompt_token_ids + done.token_ids
                await asyncio.sleep(turn.delay_s)
        num_ended += 1
        if num_ended in (margin, len(workload.rollouts) - margin):
            stats = await router.stats()
            counted.append((now_s(), sum(one.generated_tokens for one in stats.values())))

    before = await router.stats()
    started_s, engine_s = now_s(), _cpu_seconds_of_children()
    sampler = EngineSampler(router.stats)
    sampler.on_reading = observe
    async with background(sampler.run()):
        async with asyncio.TaskGroup() as rollouts:
            for rollout in workload.rollouts:
                rollouts.create_task(roll_out(rollout))
        seconds, engine_s = now_s() - started_s, _cpu_seconds_of_children() - engine_s
    after = await router.stats()
    preempted = sum(after[name].preemptions - before[name].preemptions for name in after)
    (start_s, first), (end_s, last) = counted
    uses, queues = zip(*readings, strict=True)
    real = {"tokens_per_cpu_second": workload.num_sampled / engine_s} if engine_s else {}
    return real | {
        "tokens_per_second": (last - first) / (end_s - start_s),
        "whole_tokens_per_second": workload.num_sampled / seconds,
        "preemptions_per_rollout": preempted / len(workload.rollouts),
        "kv_use_mean": statistics.fmean(uses),
        "waiting_mean": statistics.fmean(queues),
        "limit": statistics.median(limits),
    }


def _cpu_seconds_of_children() -> float:
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)


@asynccontextmanager
async def _replicas(
    engine: str, options: argparse.Namespace, folder: Path
) -> AsyncIterator[Callable[[], GeneratorRouter]]:
    """Yields a function that returns the router of a run. Simulated replicas are new in each run,
    so that no session stays where an earlier run had it."""
    if engine == "simulated":
        speeds = KvSpeeds(cache_tokens=options.cache_tokens, max_running=options.max_running)
        yield lambda: GeneratorRouter([KvReplica(f"r{i}", speeds) for i in range(2)])  # type: ignore[list-item]
        return
    settings = EngineSettings(
        policy=str(with_room(options.policy, _LONGEST)),
        max_running=options.max_running,
        max_model_len=_LONGEST,
        kv_cache_bytes=options.kv_cache_bytes,
    )
    router = GeneratorRouter([await monarch_replica(settings, folder)])
    try:
        yield lambda: router
    finally:
        await router.close()


_LONGEST = 2304  # tokens of three turns of the longest answers


def _summary(repeats: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    variants = {name: medians(figures) for name, figures in repeats.items()}

    def over_best(figure: str) -> float:
        rates = {name: row[figure] for name, row in variants.items()}
        automatic = rates.pop(AUTOMATIC)
        return automatic / max(rates.values())

    figures = [name for name in variants[AUTOMATIC] if "tokens_per" in name]
    return {
        "variants": variants,
        "automatic_over_best": {figure: over_best(figure) for figure in figures},
        "repeats": repeats,
    }


def _print(title: str, measured: dict[str, Any]) -> None:
    fixed = [row for name, row in measured["variants"].items() if name != AUTOMATIC]
    best = max(row["tokens_per_second"] for row in fixed)
    rows = [
        [
            name,
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / best:.3f}",
            f"{row['whole_tokens_per_second']:,.0f}",
            f"{row['preemptions_per_rollout']:.2f}",
            f"{row['kv_use_mean']:.2f}",
            f"{row['waiting_mean']:.1f}",
            f"{row['limit']:.0f}",
        ]
        for name, row in measured["variants"].items()
    ]
    header = ["rollouts", "tokens/s", "of best", "whole", "preempted", "KV use", "queue", "limit"]
    print(title)
    print_table(header, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engines", nargs="+", choices=("simulated", "cpu"), default=["simulated", "cpu"]
    )
    parser.add_argument("--workloads", nargs="+", choices=_WORKLOADS, default=list(_WORKLOADS))
    parser.add_argument("--numbers", nargs="+", type=at_least(1), default=[64, 112, 128, 192])
    parser.add_argument("--rollouts", type=at_least(16), default=2048)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--max-running", type=at_least(1), default=256)
    parser.add_argument("--cache-tokens", type=at_least(1024), default=6144, help="simulated")
    parser.add_argument("--kv-cache-bytes", type=at_least(1), default=12 << 20, help="of the CPU")
    parser.add_argument("--policy", type=Path, default=POLICY_DIR)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/in_flight.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
