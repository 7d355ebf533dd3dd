"""How well generation and training overlap, and what would help. Pure.

The words: a part is *idle* in the share of a step's wall time in which it had nothing to do. The
best step that the given devices allow takes as long as the busier part is busy; *efficiency* is
that over the real step. Where it is far below 1 the parts wait for each other; where it is near 1
one part is the bottleneck, and only more devices for it (or less work) make steps shorter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from torchtitan_rl.orchestration.records import BufferStates, LedgerTotals
from torchtitan_rl.types import RolloutGroup

TRAINER_IDLE = "overlap/trainer_idle_share"
GENERATOR_IDLE = "overlap/generator_idle_share"

_SATURATED = 0.9  # busy share from which on a part is the limit
_EVEN = 0.15  # difference of idle shares up to which the two count as even


class Bottleneck(StrEnum):
    """What limits the steps."""

    TRAINER = "trainer"
    GENERATOR = "generator"
    BALANCED = "balanced"  # both are busy all the time
    WAITING = "waiting"  # neither is: they wait for each other


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
    """From a step's metrics (`step_metrics` and `EngineSampler`); None where one share is not
    known."""
    if TRAINER_IDLE not in metrics or GENERATOR_IDLE not in metrics:
        return None
    return Overlap(
        trainer_idle_share=metrics[TRAINER_IDLE], generator_idle_share=metrics[GENERATOR_IDLE]
    )


def advice(overlap: Overlap, *, staleness: int) -> str:
    """One sentence: who waits, and which knob would help."""
    raise NotImplementedError


class Advisor:
    """Says what limits the run: once per ``every_steps``, and at the end. Means are over the steps
    since the last time."""

    def __init__(self, *, staleness: int, every_steps: int = 20) -> None:
        self._staleness = staleness
        self._seen: deque[Overlap] = deque(maxlen=every_steps)

    def observe(self, overlap: Overlap) -> str | None:
        """Take one step in; a sentence where one is due."""
        raise NotImplementedError

    def conclude(self) -> str | None:
        """The last sentence; None where nothing was seen since the one before."""
        raise NotImplementedError


def idle_share(*, wall_s: float, busy_s: float) -> float:
    """0 to 1; 0 where no time passed."""
    return min(1.0, max(0.0, 1.0 - busy_s / wall_s)) if wall_s > 0 else 0.0


def buffer_metrics(states: BufferStates) -> dict[str, float]:
    return {
        "buffer/waiting": float(states.waiting),
        "buffer/running": float(states.running),
        "buffer/finished": float(states.finished),
        "buffer/batched": float(states.batched),
        "buffer/capacity": float(states.capacity),
    }


def overtaken_metrics(
    groups: Iterable[RolloutGroup], overtaken: frozenset[str]
) -> dict[str, float]:
    """Length and reward of the groups that younger ones overtook (``parked``), beside those of
    the others (``on_time``): short answers would be favoured where the two are not alike and parked
    groups were lost."""
    raise NotImplementedError


def total_metrics(totals: LedgerTotals) -> dict[str, float]:
    """The run's account."""
    raise NotImplementedError
