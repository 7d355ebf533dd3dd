"""The records that the controller writes: one per step, per evaluation and per ledger
reconciliation.

Ids contain the id of their parent. A group is named ``e{epoch}/{problem}``, a rollout
``{group}/r{sibling}``, and its requests ``{rollout}/t{turn}`` or, after a restart,
``{rollout}/a{attempt}/t{turn}``: request ``e0/p12/r3/t1`` is turn 1 of rollout ``e0/p12/r3`` of
group ``e0/p12``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_rl.errors import OutputError
from torchtitan_rl.routing.router import SyncReport
from torchtitan_rl.types import Episode, GenerationRequest, RolloutGroup

_MAX_UNWRITTEN = 64  # each record keeps the groups of its step in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """The tokens of a batch: ``generated = trained + sum(discarded)``. Masked tokens (by one of
    `MASKED_CAUSES`, see `ledger.py`) are in ``discarded``."""

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
    """Counts of all tokens and groups since the run began, including those from before a resume.

    Tokens: ``generated = trained + masked + discarded + buffered``; groups: ``admitted = trained +
    discarded + buffered``. The keys of mappings are causes.
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
    """One finished step. ``version`` is the version of the weights after the step.

    Durations are in seconds and cover the time since the previous step's record, which is
    ``wall_s`` long: ``rollout_s`` waiting for the batch, ``train_s`` training, ``publish_s``
    publishing the previous step's weights, ``trainer_busy_s`` training, publishing and saving.
    ``syncs`` are the weight syncs that ended in this time.

    ``episodes`` are those that were trained on; ``trainer_logprobs`` has for each the logprobs of
    its tokens in the trainer (NaN where not trained on), or None; empty if the step did not train.
    ``overtaken`` and ``flat`` have the ids of groups that were trained after younger ones, and of
    those whose advantages are all 0. ``dataset``: the metrics after the outcomes of the previous
    step.
    """

    step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    tokens: TokenCounts
    episodes: tuple[Episode, ...] = ()
    trainer_logprobs: Sequence[npt.NDArray[np.float32] | None] = ()
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
class HeldOutRecord:
    """One evaluation of the loss on held-out conversations, on one version. ``metrics`` are named
    as in the table of metrics, without ``evaluation/``."""

    step: int
    version: int
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRecord:
    """The result of comparing the ledger with the replicas, in tokens since this process started.

    ``sampled``: tokens counted by the engines of all replicas. ``lost``: tokens that replicas
    sampled but did not report before they died. ``unaccounted``: other sampled tokens that are not
    in the ledger; this must be 0.
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

    def record_held_out(self, record: HeldOutRecord) -> None: ...

    def record_account(self, record: AccountRecord) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Show on the console and in the trace that the controller does ``name`` in the block."""

    def say(self, message: str) -> None:
        """Show a message to the user."""


class RetryingRecorder:
    """The `Recorder` of the controller's loops: retries a row that could not be written, before the
    next row.

    Rows are written in order, once each. `flush` is called before each checkpoint. So no checkpoint
    is taken while a row is missing, and a resumed run has the rows of all steps that it does not
    repeat.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._unwritten: deque[Callable[[], None]] = deque()

    def record_step(self, record: StepRecord) -> None:
        self._write(lambda: self._recorder.record_step(record))

    def record_evaluation(self, record: EvaluationRecord) -> None:
        self._write(lambda: self._recorder.record_evaluation(record))

    def record_held_out(self, record: HeldOutRecord) -> None:
        self._write(lambda: self._recorder.record_held_out(record))

    def record_account(self, record: AccountRecord) -> None:
        self._write(lambda: self._recorder.record_account(record))

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.phase(name)

    def say(self, message: str) -> None:
        self._recorder.say(message)

    def flush(self) -> None:
        """Write all missing rows. Raises OutputError: a row still cannot be written."""
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
    """Return the id of a rollout's group."""
    return rollout_id.rsplit("/", 1)[0]


def group_of_request(request: GenerationRequest) -> str | None:
    """Return the id of a request's group; None for requests of other clients. The session id of a
    rollout's requests is the rollout's id."""
    session = request.session_id
    if session is None or not request.request_id.startswith(f"{session}/"):
        return None
    return group_of(session)
