"""The cost of a routing decision, and how each strategy handles many sessions.

    python -m benchmarks.router [--sessions 100000] [--repeats 5] [--replicas 1 64 4096]

- Decisions per CPU second, with the real router's strategy, sticky sessions and bookkeeping of
  loads, for 1 to 4,096 replicas and 100,000 sessions. Also the ratio of the heaviest load to the
  mean load at the end.
- Balance: the real `GeneratorRouter` with simulated replicas on a virtual clock. Sessions of three
  turns with heavy-tailed lengths arrive over time. The strategies (sticky, least loaded,
  round-robin) are compared by prompt tokens found in the prefix cache, by the work of the busiest
  replica, by the time when the last session was done, and by latency.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.options import at_least
from benchmarks.plots import bars
from benchmarks.report import heading, print_table, write_report
from benchmarks.workload import draw_length
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.routing import placement
from torchtitan_rl.routing.replicas import LoadIndex
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.simulation.replica import SimulatedReplica, Speeds
from torchtitan_rl.types import GenerationRequest, SamplingParams

Strategy = Callable[[LoadIndex, int | None, int], int | None]
"""A function that replaces `sticky_or_least_loaded` and has the same arguments."""


def least_loaded(replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
    """Choose the replica with the fewest outstanding tokens; among equal ones, the lowest index."""
    return replicas.least(min_version)


def round_robin() -> Strategy:
    """A baseline that chooses each replica in turn, whatever its load."""
    following = 0

    def choose(replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
        nonlocal following
        for offset in range(replicas.count):
            index = (following + offset) % replicas.count
            if replicas.is_eligible(index, min_version):
                following = index + 1
                return index
        return None

    return choose


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "sticky": lambda: placement.sticky_or_least_loaded,
    "least loaded": lambda: least_loaded,
    "round-robin": round_robin,
}


def _deciding(strategy: Strategy) -> AbstractContextManager[Any]:
    return patch.object(placement, "sticky_or_least_loaded", strategy)


SIZES = (1, 16, 64, 256, 1024, 4096)
_GROWTH = (64, 4096)  # numbers of replicas whose costs are compared
_OUTSTANDING = 8  # running calls of each replica while decisions are measured
_TURNS = 3
_PROMPTS = tuple((0,) * (200 + 300 * turn) for turn in range(_TURNS))  # longer in later turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """``decisions_per_second``: decisions per second of CPU time. ``heaviest_over_mean``: the
    heaviest load at the end divided by the mean load."""

    decisions_per_second: float
    heaviest_over_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The results of one simulation. Times are seconds of the virtual clock, except
    ``cpu_us_per_request``: the CPU time of router and simulation together."""

    requests: int
    sampled_tokens: int
    cached_share: float  # share of all prompt tokens
    done_s: float  # when the slowest replica was done
    slowest_over_mean: float  # ratio of the times when replicas were done
    busiest_over_mean: float  # ratio of the seconds in which replicas worked
    latency_p50_s: float
    latency_p99_s: float
    cpu_us_per_request: float


def main() -> None:
    options = _options()
    report = heading(options)
    chance = random.Random(0)
    requests = [_request(chance, session, turn=0) for session in range(options.sessions)]
    decided: dict[str, dict[int, list[Decided]]] = {
        name: {size: [] for size in SIZES} for name in STRATEGIES
    }
    for repeat in range(options.repeats):
        for name, strategy in STRATEGIES.items():
            for size in SIZES:
                one = decide(strategy(), size, requests, decisions=options.decisions, seed=repeat)
                decided[name][size].append(one)
    rates = _medians(decided, "decisions_per_second")
    loads = _medians(decided, "heaviest_over_mean")
    header = [f"{size:,}" for size in SIZES]
    print_table(["decisions/s", *header], _rows(rates, ",.0f"))
    print_table(["heaviest / mean load", *header], _rows(loads, ".2f"))
    few, many = _GROWTH
    growth = {name: row[few] / row[many] for name, row in rates.items()}
    logarithmic = math.log(many) / math.log(few)
    print(
        f"cost of a decision at {many:,} over {few} replicas (logarithmic: {logarithmic:.2f}): "
        + ", ".join(f"{name} {value:.2f}" for name, value in growth.items())
    )
    balance = simulate(options.replicas, options.simulated_sessions, options.rate)
    for size, by_strategy in balance.items():
        _print_balance(size, options.simulated_sessions, by_strategy)
    bars(
        options.output.with_suffix(".png"),
        {f"{size:,} replicas": rates["sticky"][size] for size in SIZES},
        title=f"Sticky routing, {options.sessions:,} sessions",
        label="decisions/s",
    )
    write_report(
        options.output,
        report
        | {
            "decisions": {
                name: {size: [asdict(one) for one in repeats] for size, repeats in row.items()}
                for name, row in decided.items()
            },
            "medians": {"decisions_per_second": rates, "heaviest_over_mean": loads},
            "ratios": {
                "logarithmic_growth": logarithmic,
                "cost_growth": growth,
            },
            "balance": {
                size: {name: asdict(one) for name, one in by_strategy.items()}
                for size, by_strategy in balance.items()
            },
        },
    )


def decide(
    strategy: Strategy,
    num_replicas: int,
    requests: Sequence[GenerationRequest],
    *,
    decisions: int,
    seed: int,
) -> Decided:
    """Measure decisions. Each one takes a random session, chooses its replica, adds the request's
    load, and releases the load of another request."""
    replicas = [SimulatedReplica(f"replica{i}", Speeds()) for i in range(num_replicas)]
    router = GeneratorRouter(replicas)
    pool = router._pool
    chance = random.Random(seed)
    outstanding: list[tuple[Any, int]] = []
    held = _OUTSTANDING * num_replicas
    drawn = [chance.randrange(len(requests)) for _ in range(held + decisions)]
    released = [chance.random() for _ in range(decisions)]
    started = 0.0
    with _deciding(strategy):
        for number in range(-held, decisions):
            if number == 0:
                started = time.process_time()
            request = requests[drawn[held + number]]
            state = router._placement.choose(request)
            tokens = request.sampling.max_tokens
            pool.add_request(state, tokens)
            outstanding.append((state, tokens))
            if number >= 0:
                which = int(released[number] * len(outstanding))
                outstanding[which], outstanding[-1] = outstanding[-1], outstanding[which]
                pool.release_request(*outstanding.pop())
    seconds = time.process_time() - started
    loads = list(router.outstanding_tokens().values())
    return Decided(
        decisions_per_second=decisions / seconds,
        heaviest_over_mean=max(loads) / statistics.mean(loads),
    )


def simulate(sizes: Sequence[int], num_sessions: int, rate: float) -> dict[int, dict[str, Balance]]:
    """Simulate every strategy for every number of replicas. Each simulation has its own process and
    a virtual clock, so simulations do not disturb each other."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context) as pool:
        futures = {
            size: {
                name: pool.submit(_simulate, name, size, num_sessions, rate) for name in STRATEGIES
            }
            for size in sizes
        }
        return {
            size: {name: future.result() for name, future in row.items()}
            for size, row in futures.items()
        }


def _simulate(name: str, size: int, num_sessions: int, rate: float) -> Balance:
    balance: Balance = run_virtually(balance_of(STRATEGIES[name](), size, num_sessions, rate))
    return balance


async def balance_of(
    strategy: Strategy, num_replicas: int, num_sessions: int, rate: float
) -> Balance:
    """Simulate one strategy. ``rate``: sessions that begin per replica and per second of the
    virtual clock."""
    replicas = [SimulatedReplica(f"replica{i}", Speeds()) for i in range(num_replicas)]
    router = GeneratorRouter(replicas, request_timeout_s=1e6)
    chance = random.Random(0)
    latencies: list[float] = []
    loop = asyncio.get_running_loop()

    async def run(session: int, begins_s: float, requests: Sequence[GenerationRequest]) -> None:
        await asyncio.sleep(begins_s)
        for request in requests:
            started_s = loop.time()
            await router.generate(request)
            latencies.append(loop.time() - started_s)

    begins_s, cpu_s = 0.0, time.process_time()
    with _deciding(strategy):
        async with asyncio.TaskGroup() as sessions:
            for session in range(num_sessions):
                begins_s += chance.expovariate(rate * num_replicas)
                requests = [_request(chance, session, turn) for turn in range(_TURNS)]
                sessions.create_task(run(session, begins_s, requests))
    cpu_s = time.process_time() - cpu_s
    ends, busy = [r.busy_until_s for r in replicas], [r.busy_s for r in replicas]
    p50, p99 = np.percentile(latencies, (50, 99))
    return Balance(
        requests=len(latencies),
        sampled_tokens=sum(r.sampled_tokens for r in replicas),
        cached_share=sum(r.cached_tokens for r in replicas)
        / sum(r.prompt_tokens for r in replicas),
        done_s=max(ends),
        slowest_over_mean=max(ends) / statistics.mean(ends),
        busiest_over_mean=max(busy) / statistics.mean(busy),
        latency_p50_s=float(p50),
        latency_p99_s=float(p99),
        cpu_us_per_request=1e6 * cpu_s / len(latencies),
    )


def _request(chance: random.Random, session: int, turn: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{session}/{turn}",
        prompt_token_ids=_PROMPTS[turn],
        sampling=SamplingParams(max_tokens=draw_length("pareto", chance)),
        session_id=str(session),
    )


def _medians(
    decided: dict[str, dict[int, list[Decided]]], figure: str
) -> dict[str, dict[int, float]]:
    return {
        name: {
            size: statistics.median(getattr(one, figure) for one in repeats)
            for size, repeats in row.items()
        }
        for name, row in decided.items()
    }


def _rows(medians: dict[str, dict[int, float]], form: str) -> list[list[str]]:
    return [[name, *(format(row[size], form) for size in SIZES)] for name, row in medians.items()]


def _print_balance(size: int, num_sessions: int, balance: dict[str, Balance]) -> None:
    print(f"\n{size:,} replicas, {num_sessions:,} sessions of {_TURNS} turns")
    header = ["strategy", "cached", "all done s", "slowest / mean", "busiest / mean"]
    print_table(
        [*header, "p50 s", "p99 s", "CPU us"],
        [
            [
                name,
                f"{one.cached_share:.1%}",
                f"{one.done_s:.1f}",
                f"{one.slowest_over_mean:.2f}",
                f"{one.busiest_over_mean:.2f}",
                f"{one.latency_p50_s:.2f}",
                f"{one.latency_p99_s:.2f}",
                f"{one.cpu_us_per_request:.0f}",
            ]
            for name, one in balance.items()
        ],
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=100_000, help="to make decisions for")
    parser.add_argument("--decisions", type=int, default=20_000, help="in each repeat")
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[1, 64, 1024, 4096], help="simulated"
    )
    parser.add_argument("--simulated-sessions", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=10.0, help="sessions per second and replica")
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/router.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
