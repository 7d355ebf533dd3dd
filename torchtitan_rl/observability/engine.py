"""Measures what engines and the controller's event loop do during a step, and how well generation
and training overlap.

Engines are sampled while they run, because at the end of a step they are idle again.

The *idle share* of a part, the trainer or the generator, is the share of a step's wall time in
which it had nothing to do. A step takes at least as long as the busier part is busy; *efficiency*
is this time divided by the step's. Far below 1, the parts wait for each other; near 1, one part is
the bottleneck, and only more devices for it (or less work) make steps shorter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import NoReturn

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.routing.restarts import first_name
from torchtitan_rl.types import EngineStats

StatsByReplica = Mapping[str, EngineStats]

_READING_S = 5.0  # a reading that takes longer is skipped
_REPLICA_S = 2e-3  # of an interval, at least; reading a replica takes the event loop about 0.1 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sums over the replicas of one reading: a step can have a hundred thousand statistics.
    ``training`` counts those that sample for training, and ``idle`` those of them without a
    request."""

    replicas: int
    training: int
    idle: int
    running: int
    waiting: int
    preemptions: int
    kv_tokens: int
    kv_use: float
    kv_use_max: float
    tokens_per_second: float


def load_of(reading: StatsByReplica, reserved: Collection[str] = ()) -> Load:
    """Sum up a reading. ``reserved``: see `EngineSampler`."""
    stats = reading.values()
    training = [one for name, one in reading.items() if first_name(name) not in reserved]
    return Load(
        replicas=len(stats),
        training=len(training),
        idle=sum(one.running + one.waiting == 0 for one in training),
        running=sum(one.running for one in stats),
        waiting=sum(one.waiting for one in stats),
        preemptions=sum(one.preemptions for one in stats),
        kv_tokens=sum(one.kv_tokens for one in stats),
        kv_use=sum(one.kv_use for one in stats),
        kv_use_max=max((one.kv_use for one in stats), default=0.0),
        tokens_per_second=sum(one.tokens_per_second for one in stats),
    )


class EngineSampler:
    """Calls ``read`` every ``interval_s`` seconds while `run` runs, or less often if there are more
    than a hundred replicas.

    A reading that fails or takes too long is counted and skipped: a replica has just died or hangs,
    which the router reports. ``on_reading`` is called with each successful reading. ``reserved``
    replicas only evaluate. They, and those that replace them, do not count as idle generators.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[StatsByReplica]],
        *,
        reserved: Collection[str] = (),
        interval_s: float = 0.25,
    ) -> None:
        self._read = read
        self.on_reading: Callable[[StatsByReplica], None] | None = None
        self._reserved = frozenset(reserved)
        self._interval_s = interval_s
        self._loads: list[Load] = []
        self._num_failed = 0
        self.newest: StatsByReplica = {}

    def take(self) -> dict[str, float]:
        """Return the metrics of the time since the last call."""
        loads, self._loads = self._loads, []
        num_failed, self._num_failed = self._num_failed, 0
        metrics = engine_metrics(loads) | idle_metrics(loads)
        return metrics | {"engine/failed_readings": float(num_failed)}

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(max(self._interval_s, len(self.newest) * _REPLICA_S))
            try:
                async with asyncio.timeout(_READING_S):
                    self.newest = await self._read()
                self._loads.append(load_of(self.newest, self._reserved))
                if self.on_reading is not None:
                    self.on_reading(self.newest)
            except (TorchtitanRLError, TimeoutError):
                self._num_failed += 1


class LoopLagSampler:
    """Measures the lag of the event loop. If the lag is t, code in the loop has blocked it for at
    least t.

    Sleeps ``interval_s`` repeatedly, and records how much later than requested it wakes. A sleep
    that is still overdue is counted in the next reading.
    """

    def __init__(self, interval_s: float = 0.05) -> None:
        self._interval_s = interval_s
        self._lags_ms: list[float] = []

    def take(self) -> tuple[float, float]:
        """Return the mean and the maximum lag since the last call, in ms; 0 without a sample."""
        lags_ms, self._lags_ms = self._lags_ms or [0.0], []
        return fmean(lags_ms), max(lags_ms)

    async def run(self) -> NoReturn:
        while True:
            due_s = time.perf_counter() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self._lags_ms.append(max(0.0, 1e3 * (time.perf_counter() - due_s)))


def idle_metrics(loads: Sequence[Load]) -> dict[str, float]:
    """The idle share of the replicas that sample for training: the share of readings without a
    request."""
    readings = sum(load.training for load in loads)
    return {GENERATOR_IDLE: sum(load.idle for load in loads) / readings} if readings else {}


def engine_metrics(loads: Sequence[Load]) -> dict[str, float]:
    """The loads of all engines, over the readings in which some engine had work. Without such a
    reading, loads are left out."""
    metrics: dict[str, float] = {}
    if loads:
        metrics["engine/replicas"] = float(loads[-1].replicas)
        metrics["engine/preemptions"] = float(loads[-1].preemptions)
        metrics["engine/kv_cache_tokens"] = float(loads[-1].kv_tokens)
    busy = [load for load in loads if load.running + load.waiting]
    if not busy:
        return metrics
    return metrics | {
        "engine/running_mean": fmean(load.running for load in busy),
        "engine/running_max": float(max(load.running for load in busy)),
        "engine/waiting_mean": fmean(load.waiting for load in busy),
        "engine/waiting_max": float(max(load.waiting for load in busy)),
        "engine/kv_use_mean": sum(load.kv_use for load in busy)
        / sum(load.replicas for load in busy),
        "engine/kv_use_max": max(load.kv_use_max for load in busy),
        "engine/tokens_per_second": fmean(load.tokens_per_second for load in busy),
    }


TRAINER_IDLE = "overlap/trainer_idle_share"
GENERATOR_IDLE = "overlap/generator_idle_share"
EFFICIENCY = "overlap/efficiency"
SHARES_CORES = "overlap/shares_cores"

_SATURATED = 0.9  # a part with at least this busy share is the bottleneck
_EVEN = 0.15  # idle shares that differ by at most this count as equal


class Bottleneck(StrEnum):
    """The part that limits the steps."""

    TRAINER = "trainer"
    GENERATOR = "generator"
    BALANCED = "balanced"  # both are busy all the time
    WAITING = "waiting"  # neither is the bottleneck: they wait for each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Idle shares of a step's wall time, 0 to 1; the generator's is the mean over replicas."""

    trainer_idle_share: float
    generator_idle_share: float

    @property
    def efficiency(self) -> float:
        return 1.0 - min(self.trainer_idle_share, self.generator_idle_share)

    @property
    def bottleneck(self) -> Bottleneck:
        if self.efficiency < _SATURATED:
            return Bottleneck.WAITING
        difference = self.trainer_idle_share - self.generator_idle_share
        if abs(difference) <= _EVEN:
            return Bottleneck.BALANCED
        return Bottleneck.GENERATOR if difference > 0 else Bottleneck.TRAINER


def overlap_of(metrics: Mapping[str, float]) -> Overlap | None:
    """Read the idle shares from a step's metrics; None if a share is missing."""
    if TRAINER_IDLE not in metrics or GENERATOR_IDLE not in metrics:
        return None
    return Overlap(
        trainer_idle_share=metrics[TRAINER_IDLE], generator_idle_share=metrics[GENERATOR_IDLE]
    )


def advice(overlap: Overlap, *, staleness: int, is_colocated: bool = False) -> str:
    """Name the bottleneck, and the setting that would help, in one sentence.

    The advice applies only if each part has its own devices or CPU cores. If the parts share
    devices or cores, a setting that helps one part takes time from the other.
    """
    if is_colocated:
        return (
            f"the trainer has the devices {1 - overlap.trainer_idle_share:.0%} of the time; with "
            "placement separate, devices of their own and schedule.staleness 1, training and "
            "generation overlap"
        )
    trainer, generator = f"{overlap.trainer_idle_share:.0%}", f"{overlap.generator_idle_share:.0%}"
    match overlap.bottleneck:
        case Bottleneck.GENERATOR:
            return (
                f"generation is the bottleneck: the trainer waits {trainer} of the time; give "
                "generation more devices"
            )
        case Bottleneck.TRAINER:
            return (
                f"the trainer is the bottleneck: replicas have nothing to do {generator} of the "
                "time; give the trainer more devices"
            )
        case Bottleneck.BALANCED:
            return (
                f"balanced: the trainer waits {trainer} of the time and replicas {generator}; only "
                "more devices for both make steps shorter"
            )
        case Bottleneck.WAITING if staleness == 0:
            return (
                f"generation and training alternate: the trainer waits {trainer} of the time and "
                f"replicas {generator}; with schedule.staleness 1 they overlap"
            )
        case Bottleneck.WAITING:
            return (
                f"generation and training wait for each other: the trainer {trainer} of the time "
                f"and replicas {generator}; where answers differ in length, a larger "
                "schedule.staleness or schedule.max_overtaking_share helps"
            )


class Advisor:
    """Reports what limits the run, from the mean idle shares of each period of ``every_steps``
    steps.

    It returns advice after the first period, after each period with a new bottleneck, and at the
    end. The first step is left out, because engines warm up in it. A run with fewer than
    ``MIN_STEPS`` further steps gets no advice, and neither does a run whose parts share their CPU
    cores.
    """

    MIN_STEPS = 10

    def __init__(
        self,
        *,
        staleness: int,
        is_colocated: bool = False,
        shares_cores: bool = False,
        every_steps: int = 20,
    ) -> None:
        self._staleness = staleness
        self._is_colocated = is_colocated
        self._shares_cores = shares_cores
        self._every_steps = every_steps
        self._seen: list[Overlap] = []
        self._has_warmed_up = False
        self._said: Bottleneck | None = None

    def observe(self, overlap: Overlap) -> str | None:
        """Record a step, and return advice if it is due."""
        if not self._has_warmed_up:
            self._has_warmed_up = True
            return None
        self._seen.append(overlap)
        if len(self._seen) < self._every_steps:
            return None
        mean = _mean(self._seen)
        self._seen.clear()
        if mean.bottleneck is self._said:
            return None
        self._said = mean.bottleneck
        return self._advice(mean)

    def conclude(self) -> str | None:
        """Return advice for the end; None if too few steps followed the last period."""
        return self._advice(_mean(self._seen)) if len(self._seen) >= self.MIN_STEPS else None

    def _advice(self, mean: Overlap) -> str | None:
        if self._shares_cores:
            return None
        return advice(mean, staleness=self._staleness, is_colocated=self._is_colocated)


def idle_share(*, wall_s: float, busy_s: float) -> float:
    """The idle share, from 0 to 1; 0 if no time passed."""
    return min(1.0, max(0.0, 1.0 - busy_s / wall_s)) if wall_s > 0 else 0.0


def _mean(overlaps: Sequence[Overlap]) -> Overlap:
    return Overlap(
        trainer_idle_share=fmean(one.trainer_idle_share for one in overlaps),
        generator_idle_share=fmean(one.generator_idle_share for one in overlaps),
    )
