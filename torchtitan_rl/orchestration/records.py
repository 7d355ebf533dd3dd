"""What the controller tells its recorder: one record per optimizer step and per evaluation."""

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
class BufferStates:
    """Groups of the work buffer by state when a batch was taken; ``capacity`` bounds their sum."""

    waiting: int  # admitted, not started
    running: int
    finished: int  # and not in a batch
    batched: int  # in the batch that is trained now
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTotals:
    """Where everything went since the run began, earlier lives of a resumed run included.

    Tokens: generated = trained + masked + discarded + buffered; groups: admitted = trained +
    discarded + buffered. The mappings are by cause.
    """

    tokens_generated: int
    tokens_trained: int
    tokens_masked: Mapping[str, int]
    tokens_discarded: Mapping[str, int]
    tokens_buffered: int
    groups_admitted: int
    groups_trained: int
    groups_discarded: Mapping[str, int]
    groups_buffered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of the loop. ``version`` is of the weights after it; durations are in seconds.

    It is made in the moment in which the step's weights are there. All durations are of the time
    since the previous step's moment, which ``wall_s`` is the whole of: in ``rollout_s`` the trainer
    waited for the batch, in ``publish_s`` it published the weights of the step before, in
    ``trainer_busy_s`` it trained, published or saved. ``syncs`` ended in that time.
    ``overtaken``: ids of those groups that younger ones were trained before.
    """

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    tokens: TokenCounts
    trainer: Mapping[str, float]
    syncs: tuple[SyncReport, ...] = ()
    publish_s: float
    rollout_s: float
    train_s: float
    wall_s: float
    trainer_busy_s: float | None = None
    buffer: BufferStates | None = None
    overtaken: frozenset[str] = frozenset()
    totals: LedgerTotals | None = None
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Fixed problems, answered by one version. A rollout with a reward of at least
    ``success_reward`` has solved its problem."""

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    seconds: float
    success_reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRecord:
    """The account against its source, of this process; all in tokens.

    ``sampled`` is what the engines of all replicas counted. ``lost``: sampled by a replica that
    died, and never heard of. ``unaccounted`` is what is missing of the rest, which must be 0.
    """

    step: int
    version: int
    sampled: int
    lost: int
    unaccounted: int


class Recorder(Protocol):
    """Turns records into files and lines on a terminal."""

    def record_step(self, record: StepRecord) -> None: ...

    def record_evaluation(self, record: EvaluationRecord) -> None: ...

    def record_account(self, record: AccountRecord) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Marks what the controller is doing, in the progress display and the trace."""
        ...

    def say(self, message: str) -> None:
        """Tell the user something, once."""
        ...
