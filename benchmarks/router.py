"""What a routing decision costs, and what each strategy makes of many sessions.

    python -m benchmarks.router [--sessions 100000] [--repeats 5]

- Decisions per CPU second: strategy, session homes and load bookkeeping of the real router's parts,
  for 1 to 4,096 replicas, with 100,000 sessions known.
- Balance: the real `GeneratorRouter` over simulated replicas on a virtual clock; sessions of three
  turns with heavy-tailed lengths arrive over time. Sticky against least loaded and round-robin, by
  prompt tokens found in the prefix cache, by when the last replica was done, and by latency.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plots import bars
from benchmarks.report import machine, print_table, write_report
from benchmarks.simulated_replica import SimulatedReplica, Speeds
from benchmarks.workload import draw_length
from tests.fast.virtual_clock import run_virtually
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.routing.strategies import (
    LeastLoaded,
    RoundRobin,
    RoutingStrategy,
    StickyLeastLoaded,
)
from torchtitan_rl.types import GenerationRequest, SamplingParams

STRATEGIES: dict[str, Callable[[], RoutingStrategy]] = {
    "sticky": StickyLeastLoaded,
    "least loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
SIZES = (1, 16, 64, 256, 1024, 4096)
_OUTSTANDING = 8  # calls of each replica while decisions are measured


def main() -> None:
    options = _options()
    chance = random.Random(0)
    requests = [_request(chance, session, turn=0) for session in range(options.sessions)]
    decisions: dict[str, dict[int, list[float]]] = {
        name: {size: [] for size in SIZES} for name in STRATEGIES
    }
    for _ in range(options.repeats):
        for name, strategy in STRATEGIES.items():
            for size in SIZES:
                rate = decisions_per_second(strategy(), size, requests)
                decisions[name][size].append(rate)
    medians = {
        name: {size: statistics.median(rates) for size, rates in by_size.items()}
        for name, by_size in decisions.items()
    }
    print_table(
        ["decisions/s", *(f"{size:,}" for size in SIZES)],
        [[name, *(f"{row[size]:,.0f}" for size in SIZES)] for name, row in medians.items()],
    )
    balance = {
        name: run_virtually(
            balance_of(strategy(), options.replicas, options.simulated_sessions, options.rate)
        )
        for name, strategy in STRATEGIES.items()
    }
    print(f"\n{options.replicas} replicas, {options.simulated_sessions:,} sessions of 3 turns")
    print_table(
        ["strategy", "cached", "all done s", "slowest / mean", "p50 s", "p99 s"],
        [
            [
                name,
                f"{row['cached_share']:.1%}",
                f"{row['done_s']:.0f}",
                f"{row['slowest_over_mean']:.2f}",
                f"{row['latency_p50_s']:.2f}",
                f"{row['latency_p99_s']:.2f}",
            ]
            for name, row in balance.items()
        ],
    )
    bars(
        options.output.with_suffix(".png"),
        {f"{size:,} replicas": medians["sticky"][size] for size in SIZES},
        title=f"Sticky routing, {options.sessions:,} sessions",
        label="decisions/s",
    )
    write_report(
        options.output,
        {
            "machine": machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "decisions_per_second": decisions,
            "medians": medians,
            "cost_4096_over_1024": {name: row[1024] / row[4096] for name, row in medians.items()},
            "balance": balance,
        },
    )


def decisions_per_second(
    strategy: RoutingStrategy,
    num_replicas: int,
    requests: Sequence[GenerationRequest],
    *,
    decisions: int = 20_000,
) -> float:
    """Each decision takes a session at random, chooses, adds the load, and releases another's."""
    replicas = [SimulatedReplica(f"replica{i}", Speeds()) for i in range(num_replicas)]
    router = GeneratorRouter(replicas, strategy=strategy)
    slots = router._slots
    chance = random.Random(0)
    outstanding: list[tuple[Any, int]] = []
    drawn = [chance.randrange(len(requests)) for _ in range(decisions)]
    released = [chance.random() for _ in range(decisions)]
    held = _OUTSTANDING * num_replicas
    started = 0.0
    for number in range(-held, decisions):
        if number == 0:
            started = time.process_time()
        request = requests[drawn[number % decisions]]
        slot = router._choose(request)
        tokens = request.sampling.max_tokens
        slots.add_request(slot, tokens)
        outstanding.append((slot, tokens))
        if number >= 0:
            which = int(released[number] * len(outstanding))
            outstanding[which], outstanding[-1] = outstanding[-1], outstanding[which]
            slots.release_request(*outstanding.pop())
    return decisions / (time.process_time() - started)


async def balance_of(
    strategy: RoutingStrategy, num_replicas: int, num_sessions: int, rate: float
) -> dict[str, float]:
    """``rate``: sessions that begin, a second and replica, of the virtual clock."""
    replicas = [SimulatedReplica(f"replica{i}", Speeds()) for i in range(num_replicas)]
    router = GeneratorRouter(replicas, strategy=strategy, request_timeout_s=1e6)
    chance = random.Random(0)
    latencies: list[float] = []
    loop = asyncio.get_running_loop()

    async def run(session: int, begins_s: float, requests: Sequence[GenerationRequest]) -> None:
        await asyncio.sleep(begins_s)
        for request in requests:
            started_s = loop.time()
            await router.generate(request)
            latencies.append(loop.time() - started_s)

    begins_s = 0.0
    async with asyncio.TaskGroup() as sessions:
        for session in range(num_sessions):
            begins_s += chance.expovariate(rate * num_replicas)
            requests = [_request(chance, session, turn) for turn in range(3)]
            sessions.create_task(run(session, begins_s, requests))
    ends = [replica.busy_until_s for replica in replicas]
    p50, p99 = np.percentile(latencies, (50, 99))
    return {
        "cached_share": sum(r.cached_tokens for r in replicas)
        / sum(r.prompt_tokens for r in replicas),
        "done_s": max(ends),
        "slowest_over_mean": max(ends) / statistics.mean(ends),
        "latency_p50_s": float(p50),
        "latency_p99_s": float(p99),
    }


def _request(chance: random.Random, session: int, turn: int) -> GenerationRequest:
    """Prompts grow with the turns."""
    return GenerationRequest(
        request_id=f"{session}/{turn}",
        prompt_token_ids=(0,) * (200 + 300 * turn),
        sampling=SamplingParams(max_tokens=draw_length("pareto", chance)),
        session_id=str(session),
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=100_000, help="that decisions are made for")
    parser.add_argument("--replicas", type=int, default=64, help="of the balance")
    parser.add_argument("--simulated-sessions", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=10.0, help="sessions a second and replica")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/router.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
