"""The state that the controller's loops share: the run's components, position, groups and waits.

All loops run on one event loop, so this state does not change between two awaits of a loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_rl.distillation.scoring import Teachers
from torchtitan_rl.orchestration.batching import Batched
from torchtitan_rl.orchestration.config import Capacity
from torchtitan_rl.orchestration.journal import Journal
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import Recorder, RetryingRecorder
from torchtitan_rl.orchestration.watchdog import WaitRegistry
from torchtitan_rl.orchestration.work_buffer import WorkBuffer
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.task import AdaptiveDataset, Dataset, Outcome, metrics_of
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.batch import Examples, StepLoss, StepOutput, TrainingBatch
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.types import Problem, RolloutGroup
from torchtitan_rl.weights.distribution import WeightHandle


class Claim(Protocol):
    """The right to write into the run's folder, which another host may take over."""

    def check(self) -> None:
        """Check the right to write; called before each write. Raises OutputError: this process does
        not own the folder, or this cannot be determined."""

    async def wait_until_lost(self) -> None:
        """Wait until this process has lost the right to write. Raises RunTakenOverError: another
        controller owns the folder."""


class Unshared:
    """The `Claim` on a folder that no other host can access."""

    def check(self) -> None:
        return

    async def wait_until_lost(self) -> None:
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The components of a run. ``ledger`` observes the router; ``identity`` describes the run and
    is stored in each checkpoint. A rollout with a reward of at least ``success_reward`` counts as
    solved. ``examples`` returns the demonstrations of a step, which are read in a thread; None:
    there are none."""

    dataset: Dataset
    evaluation_problems: Sequence[Problem]
    rollouter: Rollouter
    batcher: Callable[[Sequence[RolloutGroup]], Batched]
    trainer: Trainer
    router: GeneratorRouter
    recorder: Recorder
    checkpoints: CheckpointDirectory
    journal: Journal
    ledger: TokenLedger
    claim: Claim = field(default_factory=Unshared)
    identity: Mapping[str, Any] = field(default_factory=dict)
    success_reward: float = 1.0 - 1e-9
    examples: Callable[[int], TrainingBatch | None] | None = None
    teachers: Teachers | None = None


class RunState:
    """The state of one run. ``step`` is the number of finished steps, and ``version`` the number of
    steps that changed the weights. ``num_changes`` grows whenever anything changes."""

    def __init__(self, capacity: Capacity, parts: Parts) -> None:
        self.capacity = capacity
        self.parts = parts
        self.recorder = RetryingRecorder(parts.recorder)
        self.ledger = parts.ledger
        self.buffer = WorkBuffer(capacity, parts.ledger)
        self.waits = WaitRegistry()
        self.step = 0
        self.version = 0
        self.evaluated_step: int | None = None
        self.is_stopping = False
        self.dataset_metrics: Mapping[str, float] = {}  # as of the newest step
        self.skipped: list[Outcome] = []  # not yet reported to the dataset
        self.num_changes = 0
        self._changed = asyncio.Event()

    def outcome(self, group: RolloutGroup) -> Outcome:
        """Return a group's outcome, for the dataset."""
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        solved = [reward >= self.parts.success_reward for reward in rewards]
        return Outcome(problem=group.problem, solved=fmean(solved) if solved else None)

    def record_outcomes(self, trained: Sequence[RolloutGroup]) -> None:
        """Report to the dataset the outcomes of a step's groups and of skipped groups, only after a
        step or a skipped batch, so that its choices do not depend on the order in which they
        finish."""
        skipped = sorted(self.skipped, key=lambda outcome: outcome.problem.problem_id)
        self.skipped.clear()
        if isinstance(self.parts.dataset, AdaptiveDataset):
            self.parts.dataset.record([*map(self.outcome, trained), *skipped])
        self.measure_dataset()

    def measure_dataset(self) -> None:
        """Store the dataset's metrics for the next step's record."""
        self.dataset_metrics = dict(metrics_of(self.parts.dataset))

    def notify(self) -> None:
        """Make every loop in `wait_until` check its condition again, because something changed."""
        self.num_changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until(
        self, holds: Callable[[], bool], name: str, *, details: Callable[[], str] | None = None
    ) -> None:
        """Return once ``holds()``; the watchdog reports the wait by ``name`` and ``details()``."""
        if holds():
            return
        with self.waits.track(name, details=details):
            while not holds():
                await self._changed.wait()


class Trainer(Protocol):
    """All ranks of a policy trainer as one object. Only one method may run at a time, except that
    `finish_checkpoint` and `wait_until_lost` may run alongside another call."""

    async def wait_until_lost(self) -> None:
        """Wait until a process of the trainer has died, whether or not a call runs. Raises
        TrainerLostError: a process has died."""

    async def train_step(
        self, batch: TrainingBatch, loss: StepLoss | None = None, *, examples: Examples = None
    ) -> StepOutput:
        """Take one optimizer step, of another ``loss`` than the configured one if it is given. With
        ``examples``, their supervised loss is added (``trainer.sft_coefficient``).

        Raises:
            DivergedError: the loss or the gradient is not finite. The weights have not changed.
            TrainerLostError: a process of the trainer died. Every other method raises this too.
        """

    async def logprobs(self, batch: TrainingBatch) -> npt.NDArray[np.float32]:
        """Compute the logprob [N] of every token under the current weights, at the batch's
        temperature; 0 for the first token of an episode."""

    async def publish(self, keep: frozenset[int] = frozenset()) -> WeightHandle:
        """Make the current weights readable by replicas, under the current version.

        The previously published version and the versions in ``keep`` stay readable; all other
        versions are freed.

        Raises:
            WeightSyncError: the memory has no room for the version. Versions that were not freed
                stay readable.
        """

    async def save_checkpoint(
        self, path: Path, attachments: Mapping[str, bytes], *, version: int
    ) -> None:
        """Copy model, optimizer, scheduler and RNG, and write the copy while training continues.

        Returns when the copy has been made. Waits first if another checkpoint is still being
        written. ``attachments`` are files of the checkpoint, by name (see `load_attachment`);
        ``version`` is their policy version.

        Raises:
            CheckpointError: the trainer holds another version (a step ended after its deadline), or
                the previous checkpoint failed and `finish_checkpoint` has not reported it yet.
                Nothing is written.
        """

    async def finish_checkpoint(self) -> None:
        """Return when the last saved checkpoint is on disk under its final name. Raises
        CheckpointError: the checkpoint could not be written; nothing of it is left on disk."""

    async def load_checkpoint(self, path: Path) -> None:
        """Restore everything that `save_checkpoint` copied. Raises CheckpointError: the checkpoint
        is torn or damaged; nothing was changed."""

    async def offload(self) -> None:
        """Move everything from device to host memory. Before the next `onload`, only
        `finish_checkpoint`, `onload` and `close` may be called. A second call has no effect."""

    async def onload(self) -> None:
        """Move everything back to the devices. A second call has no effect."""

    async def export_hf(self, path: Path) -> None: ...

    async def close(self) -> None:
        """Finish the checkpoint that is being written, then end the trainer."""
