"""What engines and the controller's event loop do during a step, sampled while they do it.

At the end of a step the engines are idle again, so that a single reading there would show nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import fmean
from typing import Any, Self

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.observability.asynchrony import GENERATOR_IDLE
from torchtitan_rl.routing.restarts import first_name
from torchtitan_rl.types import EngineStats

StatsByReplica = Mapping[str, EngineStats]


class _Sampler:
    """Runs ``_sample`` in the background while its ``async with`` is open."""

    async def __aenter__(self) -> Self:
        self._open = AsyncExitStack()
        await self._open.enter_async_context(_background(self._sample()))
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._open.__aexit__(*error)

    async def _sample(self) -> None:
        raise NotImplementedError


class EngineSampler(_Sampler):
    """Calls ``read`` every ``interval_s`` seconds.

    A reading that fails or takes longer than ``timeout_s`` (a replica just died, or hangs; the
    router reports that) is counted and skipped.

    Args:
        reserved: replicas that only evaluate; neither they nor those that replace them count as
            idle generators.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[StatsByReplica]],
        *,
        reserved: Collection[str] = (),
        interval_s: float = 0.25,
        timeout_s: float = 5.0,
    ) -> None:
        self._read = read
        self._reserved = frozenset(reserved)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._readings: list[StatsByReplica] = []
        self._num_failed = 0

    def take(self) -> dict[str, float]:
        """Return the metrics of the time since the last call."""
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


class LoopLagSampler(_Sampler):
    """Measures how late the event loop is: something in it blocked for at least that long.

    Sleeps ``interval_s`` again and again, and notes how much later than asked it wakes. A wait that
    is still overdue counts in the next reading.
    """

    def __init__(self, interval_s: float = 0.05) -> None:
        self._interval_s = interval_s
        self._lags_ms: list[float] = []

    def take(self) -> tuple[float, float]:
        """Return mean and maximum in ms since the last call; 0 if nothing was sampled."""
        lags_ms, self._lags_ms = self._lags_ms or [0.0], []
        return fmean(lags_ms), max(lags_ms)

    async def _sample(self) -> None:
        while True:
            due_s = time.perf_counter() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self._lags_ms.append(max(0.0, 1e3 * (time.perf_counter() - due_s)))


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
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` while the block is open, then cancel it; its own error is raised at the end."""
    task = asyncio.create_task(work, name="sampler")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
