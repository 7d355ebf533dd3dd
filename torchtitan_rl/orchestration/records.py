"""What the controller tells its recorder: one record per optimizer step and per validation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torchtitan_rl.routing.router import SyncReport
from torchtitan_rl.types import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Where a step's sampled tokens went: generated = trained + the sum of ``discarded``."""

    generated: int
    trained: int
    discarded: Mapping[str, int] = field(default_factory=dict)  # by cause


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of the loop. ``version`` is of the weights after it; durations are in seconds."""

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    tokens: TokenCounts
    trainer: Mapping[str, float]
    sync: SyncReport | None
    publish_s: float
    rollout_s: float
    train_s: float
    sync_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord:
    """Fixed problems, answered by one version."""

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    seconds: float


class Recorder(Protocol):
    """Turns records into files and lines on a terminal."""

    def record_step(self, record: StepRecord) -> None: ...

    def record_validation(self, record: ValidationRecord) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Marks what the controller is doing, in the progress display and the trace."""
        ...

    def say(self, message: str) -> None:
        """Tell the user something, once."""
        ...
