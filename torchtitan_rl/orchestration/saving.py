"""Checkpoints of a whole run, written while it goes on, and how a run continues from one.

Invariants: what a checkpoint holds is of one moment: trainer, dataset position and every untrained
group; turns that finish after that moment are in the journal begun at it. A write that failed
leaves the checkpoints before it, and their journals, as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.errors import CheckpointError, OutputError
from torchtitan_rl.orchestration.journal import JournalError
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.orchestration.recovery import (
    RecordedGroups,
    SavedGroups,
    groups_from_bytes,
    groups_to_bytes,
)
from torchtitan_rl.orchestration.resume_choice import GROUPS, JOURNAL_MARK
from torchtitan_rl.orchestration.rows import Rows
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.sampling import group_of
from torchtitan_rl.orchestration.trainer import Trainer
from torchtitan_rl.orchestration.work_buffer import GroupState
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.task import Dataset
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.checkpoint_files import load_attachment
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint
from torchtitan_rl.types import Completion


class RunSaver:
    """Saves and restores; one checkpoint is written at a time.

    ``identity`` says which run this is, and goes into each checkpoint; after ``max_failures``
    checkpoints in a row that could not be written the run ends.
    """

    def __init__(
        self,
        state: RunState,
        *,
        dataset: Dataset,
        trainer: Trainer,
        rollouter: Rollouter,
        router: GeneratorRouter,
        checkpoints: CheckpointDirectory,
        journals: JournalDirectory,
        rows: Rows,
        recorder: Recorder,
        identity: Mapping[str, Any],
        keep: int,
        max_failures: int,
    ) -> None:
        self._state = state
        self._dataset = dataset
        self._trainer = trainer
        self._rollouter = rollouter
        self._router = router
        self._checkpoints = checkpoints
        self._journals = journals
        self._rows = rows
        self._recorder = recorder
        self._identity = identity
        self._keep = keep
        self._max_failures = max_failures
        self._recorded = RecordedGroups()
        self._saved_step: int | None = None  # of the newest complete checkpoint
        self._saved_evaluation: int | None = None  # ``evaluated_step`` of it
        self._writing: asyncio.Task[None] | None = None
        self._failures: list[CheckpointError] = []  # in a row

    async def restore(self, resume_from: NewestCheckpoint | None) -> RecordedGroups:
        """Go on from a checkpoint; where there is none, from the beginning, but with the turns that
        were finished then. None starts anew. Returns what the groups go on with."""
        if resume_from is None:
            self._journals.begin(0, version=self._state.version)
            return self._recorded
        groups, mark = SavedGroups(), 0
        if resume_from.path is not None:
            document = await self._trainer.load_checkpoint(resume_from.path)
            mark = document.get(JOURNAL_MARK, 0)
            groups = groups_from_bytes(
                await asyncio.to_thread(load_attachment, resume_from.path, GROUPS)
            )
            self._load(document, groups)
            self._recorder.say(f"resumed after step {self._state.step} from {resume_from.path}")
        step = self._state.step
        self._recorded = RecordedGroups(
            self._journals.restore(step, groups.rollouts, mark=mark),
            restored_version=self._state.version,
            admitted_versions={entry.group_id: entry.admitted_version for entry in groups.entries},
        )
        self._journals.restart(
            step,
            self._recorded.rollouts,
            groups.rollouts,
            version=self._state.version,
            mark=mark,
        )
        return self._recorded

    async def save(self) -> None:
        """Take the run as it is now; returns when training may go on. The files are complete after
        `finish`. A checkpoint that cannot be written is reported, and the next one is tried.

        Raises:
            CheckpointError: the last of too many that could not be written.
        """
        await self._until_written()
        step = self._state.step
        if self._saved_step == step:
            return
        try:
            await self._take(step)
        except CheckpointError as error:
            self._note_failure(step, error)
        else:
            complete = self._complete(step, self._state.evaluated_step)
            self._writing = asyncio.create_task(complete, name=f"checkpoint {step}")
        self._require_writable()

    async def finish(self) -> None:
        """Save the run as it is now, whatever failed before, and return when it is on disk.

        Raises:
            CheckpointError: it could not be written.
            OutputError: a row could not be written.
        """
        await self._until_written()
        self._failures.clear()
        self._rows.flush()
        if self._state.buffer.entries or self._saved_evaluation != self._state.evaluated_step:
            self._saved_step = None  # what has come since then is saved as well
        await self.save()
        await self._until_written()
        if self._failures:
            raise self._failures[-1]

    async def _until_written(self) -> None:
        """Wait until the checkpoint that is being written is complete, or has failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._state.waits.on("a checkpoint is being written"):
                await writing

    async def _take(self, step: int) -> None:
        with self._recorder.phase("checkpoint"):
            # At staleness 0 the same weights and seeds sample these tokens again, bit for bit; a
            # request that goes on in the middle would draw others.
            partials = await self._router.partials() if self._state.staleness else {}
            # One moment, from here to the call of the trainer: no await.
            document, groups = self._document(), self._groups(partials)
            try:
                self._rows.flush()
                document[JOURNAL_MARK] = self._journals.begin(step, version=document["version"])
                self._keep_unclaimed()
            except (OutputError, JournalError) as error:
                raise CheckpointError(f"checkpoint {step}: {error}") from error
            await self._trainer.save_checkpoint(
                self._checkpoints.path(step),
                document,
                {GROUPS: groups},
                version=document["version"],
            )

    def _keep_unclaimed(self) -> None:
        """Recorded turns of groups that have not been admitted again come after this checkpoint."""
        for name, recorded in self._recorded.rollouts.items():
            if group_of(name) not in self._state.buffer:
                for index, turn in enumerate(recorded.turns):
                    state = recorded.env_states.get(index + 1)
                    self._journals.append(name, index, turn, state)

    async def _complete(self, step: int, evaluation: int | None) -> None:
        try:
            await self._trainer.finish_checkpoint()
        except CheckpointError as error:
            self._note_failure(step, error)
            return
        self._saved_step, self._saved_evaluation = step, evaluation
        self._failures.clear()
        try:
            await asyncio.to_thread(self._checkpoints.prune, self._keep)
            self._journals.prune(self._checkpoints.steps()[0])
        except (OSError, CheckpointError) as error:
            self._recorder.say(f"old checkpoints could not be removed: {error}")

    def _note_failure(self, step: int, error: CheckpointError) -> None:
        self._failures.append(error)
        self._recorder.say(
            f"NO CHECKPOINT of step {step} ({len(self._failures)} failed in a row, of "
            f"{self._max_failures} that end the run): {error}"
        )

    def _require_writable(self) -> None:
        if len(self._failures) >= self._max_failures:
            raise CheckpointError(
                f"{len(self._failures)} checkpoints in a row could not be written "
                f"(checkpoint.max_failures); the last: {self._failures[-1]}"
            ) from self._failures[-1]

    def _document(self) -> dict[str, Any]:
        state, buffer = self._state, self._state.buffer
        unfinished = {entry.group_id for entry in buffer.entries if entry.group is None}
        return {
            "identity": dict(self._identity),
            "step": state.step,
            "version": state.version,
            "evaluated_step": state.evaluated_step,
            "dataset": self._dataset.state_dict(),
            "ledger": state.ledger.state_dict(without=unfinished),
            "admitted": buffer.admitted,
            "trained": buffer.trained,
            "discarded": dict(buffer.discarded),
        }

    def _groups(self, partials: Mapping[str, Completion]) -> bytes:
        entries = self._state.buffer.entries
        unfinished = {
            entry.group_id: self._rollouter.snapshot(entry.group_id, partials)
            if entry.state is GroupState.RUNNING
            else self._recorded.waiting(entry.group_id)
            for entry in entries
            if entry.group is None
        }
        return groups_to_bytes(entries, unfinished)

    def _load(self, document: Mapping[str, Any], groups: SavedGroups) -> None:
        state = self._state
        state.step = self._saved_step = document["step"]
        state.version = document["version"]
        state.evaluated_step = self._saved_evaluation = document["evaluated_step"]
        state.ledger.load_state_dict(document["ledger"])
        state.buffer.restore(
            groups.entries,
            admitted=document["admitted"],
            trained=document["trained"],
            discarded=document["discarded"],
        )
        self._dataset.load_state_dict(document["dataset"])
