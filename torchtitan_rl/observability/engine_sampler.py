"""What the engines are doing while they work, sampled through a step rather than read at its end,
when they are idle again.

Work in the background of a block of code.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from statistics import fmean
from typing import Any

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.observability.asynchrony import GENERATOR_IDLE
from torchtitan_rl.routing.restarts import first_name
from torchtitan_rl.types import EngineStats

StatsByReplica = Mapping[str, EngineStats]  # by replica


class EngineSampler:
    """Calls ``read`` every ``interval_s`` while its ``async with`` is open. A reading that fails or
    takes longer than ``timeout_s`` (a replica just died, or hangs; the router reports that) is
    counted and skipped."""

    def __init__(
        self,
        read: Callable[[], Awaitable[StatsByReplica]],
        *,
        reserved: Collection[str] = (),
        interval_s: float = 0.25,
        timeout_s: float = 5.0,
    ) -> None:
        """``reserved`` replicas, which only evaluate, do not count as idle generators, nor do those
        that take their places."""
        self._read = read
        self._reserved = frozenset(reserved)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._readings: list[StatsByReplica] = []
        self._num_failed = 0

    async def __aenter__(self) -> EngineSampler:
        self._sampling = background(self._sample(), name="engine sampler")
        await self._sampling.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._sampling.__aexit__(*error)

    def take(self) -> dict[str, float]:
        """Metrics of the time since the last call, which starts the next period."""
        readings, self._readings = self._readings, []
        num_failed, self._num_failed = self._num_failed, 0
        metrics = engine_metrics(readings) | idle_metrics(readings, self._reserved)
        return metrics | {"engine/failed_readings": float(num_failed)}

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                async with asyncio.timeout(self._timeout_s):
                    self._readings.append(await self._read())
            except (TorchtitanRLError, TimeoutError):
                self._num_failed += 1


def idle_metrics(
    readings: Sequence[StatsByReplica], reserved: Collection[str] = ()
) -> dict[str, float]:
    """The share of replica time in which a replica that samples for training had no request."""
    is_idle = [
        stats.running + stats.waiting == 0
        for reading in readings
        for name, stats in reading.items()
        if first_name(name) not in reserved
    ]
    return {GENERATOR_IDLE: fmean(is_idle)} if is_idle else {}


def engine_metrics(readings: Sequence[StatsByReplica]) -> dict[str, float]:
    """Loads over the readings in which some engine had work, left out where none had."""
    metrics: dict[str, float] = {}
    if readings:
        last = readings[-1].values()
        metrics["engine/replicas"] = float(len(last))
        metrics["engine/preemptions"] = float(sum(stats.preemptions for stats in last))
    busy = [
        list(reading.values())
        for reading in readings
        if any(stats.running + stats.waiting for stats in reading.values())
    ]
    if not busy:
        return metrics
    running = [sum(stats.running for stats in reading) for reading in busy]
    waiting = [sum(stats.waiting for stats in reading) for reading in busy]
    kv_use = [stats.kv_use for reading in busy for stats in reading]
    rate = [sum(stats.tokens_per_second for stats in reading) for reading in busy]
    return metrics | {
        "engine/running_mean": fmean(running),
        "engine/running_max": float(max(running)),
        "engine/waiting_mean": fmean(waiting),
        "engine/waiting_max": float(max(waiting)),
        "engine/kv_use_mean": fmean(kv_use),
        "engine/kv_use_max": max(kv_use),
        "engine/tokens_per_second": fmean(rate),
    }


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], *, name: str) -> AsyncIterator[None]:
    """Run ``work`` as a task while the block is open, then cancel it and wait for its end.

    Raises:
        Exception: whatever ended the work before the block's end, unless the block raised itself.
    """
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
