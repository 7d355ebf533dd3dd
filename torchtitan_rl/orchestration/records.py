"""What the controller records: a row per step, per evaluation and per ledger reconciliation.

Ids nest. A group is named ``e{epoch}/{problem}``, a rollout ``{group}/r{sibling}``, and its
requests ``{rollout}/t{turn}`` or, after a restart, ``{rollout}/a{attempt}/t{turn}``: request
``e0/p12/r3/t1`` is turn 1 of rollout ``e0/p12/r3`` of group ``e0/p12``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torchtitan_rl.errors import OutputError
from torchtitan_rl.routing.router import SyncReport
from torchtitan_rl.types import Episode, GenerationRequest, RolloutGroup

_MAX_UNWRITTEN = 64  # each record holds the groups of its step


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Where the tokens of a batch went: ``generated = trained + sum(discarded)``."""

    generated: int
    trained: int
    discarded: Mapping[str, int] = field(default_factory=dict)  # by cause


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStates:
    """Number of groups in each state of the work buffer when a batch was taken; ``capacity`` bounds
    their sum."""

    waiting: int
    running: int
    finished: int
    batched: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTotals:
    """Where all tokens and groups went since the run began, before it was resumed included.

    Tokens: ``generated = trained + masked + discarded + buffered``; groups: ``admitted = trained +
    discarded + buffered``. Mappings are by cause.
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
    """One finished step; ``version`` is that of the weights after it.

    Durations are seconds since the record of the previous step, ``wall_s`` in all: ``rollout_s`` of
    waiting for the batch, ``train_s`` of training, ``publish_s`` of publishing the weights of the
    step before, ``trainer_busy_s`` of training, publishing and saving. ``syncs`` ended in that
    time. ``episodes``: of the groups, as they were trained on. ``overtaken``: ids of the groups in
    the batch that younger ones were trained before; ``flat``: of those whose advantages are all 0.
    ``dataset``: its metrics after the outcomes of the step before.
    """

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    tokens: TokenCounts
    episodes: tuple[Episode, ...] = ()
    trainer: Mapping[str, float]
    syncs: tuple[SyncReport, ...] = ()
    publish_s: float
    rollout_s: float
    train_s: float
    wall_s: float
    trainer_busy_s: float | None = None
    buffer: BufferStates | None = None
    overtaken: frozenset[str] = frozenset()
    flat: frozenset[str] = frozenset()
    totals: LedgerTotals | None = None
    switch_s: float = 0.0
    dataset: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One evaluation on one version. A rollout with a reward of at least ``success_reward`` solved
    its problem."""

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    seconds: float
    success_reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRecord:
    """The ledger compared with the replicas, in tokens since this process started.

    ``sampled``: counted by the engines of all replicas. ``lost``: sampled by replicas that died
    before they reported it. ``unaccounted``: the tokens missing of the rest, which must be 0.
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
        """Show what the controller does in the block, on the console and in the trace."""
        ...

    def say(self, message: str) -> None:
        """Show a message to the user."""
        ...


class RetryingRecorder:
    """The `Recorder` of the controller's loops: writes a missing row again, before the next one.

    Rows are written in order and once each. No checkpoint is taken while a row is missing (`flush`
    comes before it), so a resumed run has the rows of all steps that it does not repeat.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._unwritten: deque[Callable[[], None]] = deque()

    def record_step(self, record: StepRecord) -> None:
        self._write(lambda: self._recorder.record_step(record))

    def record_evaluation(self, record: EvaluationRecord) -> None:
        self._write(lambda: self._recorder.record_evaluation(record))

    def record_account(self, record: AccountRecord) -> None:
        self._write(lambda: self._recorder.record_account(record))

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.phase(name)

    def say(self, message: str) -> None:
        self._recorder.say(message)

    def flush(self) -> None:
        """Write all missing rows.

        Raises:
            OutputError: a row still cannot be written.
        """
        while self._unwritten:
            self._unwritten[0]()
            self._unwritten.popleft()

    def _write(self, write: Callable[[], None]) -> None:
        self._unwritten.append(write)
        try:
            self.flush()
        except OutputError as error:
            if len(self._unwritten) >= _MAX_UNWRITTEN:
                raise
            self.say(
                f"{len(self._unwritten)} rows could not be written and will be retried: {error}"
            )


def group_of(rollout_id: str) -> str:
    """The group that a rollout belongs to."""
    return rollout_id.rsplit("/", 1)[0]


def group_of_request(request: GenerationRequest) -> str | None:
    """The group that a request samples for; None for requests of other clients.

    A rollout's requests run in a session named after the rollout.
    """
    session = request.session_id
    if session is None or not request.request_id.startswith(f"{session}/"):
        return None
    return group_of(session)
