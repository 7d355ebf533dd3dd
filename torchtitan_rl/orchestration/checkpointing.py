"""Saves a whole run while it continues, and restores it.

Invariants: a checkpoint holds the state of one moment: trainer, dataset position and every
untrained group. Turns that finish later are in the journal begun at that moment. A failed write
leaves earlier checkpoints and their journals as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.errors import CheckpointError, OutputError
from torchtitan_rl.orchestration.ids import group_of
from torchtitan_rl.orchestration.journal import JournalError
from torchtitan_rl.orchestration.recovery import (
    GROUPS,
    JOURNAL_MARK,
    RecordedGroups,
    SavedGroups,
    groups_from_bytes,
    groups_to_bytes,
)
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.work_buffer import GroupState
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.training.checkpoint_files import load_attachment
from torchtitan_rl.training.checkpoints import NewestCheckpoint
from torchtitan_rl.types import Completion


class RunCheckpointer:
    """Writes one checkpoint at a time and keeps the ``keep`` newest. The run fails after
    ``max_failures`` checkpoints in a row that could not be written."""

    def __init__(self, state: RunState, *, keep: int, max_failures: int) -> None:
        self._state = state
        self._parts = state.parts
        self._keep = keep
        self._max_failures = max_failures
        self._recorded = RecordedGroups()
        self._saved_step: int | None = None  # of the newest complete checkpoint
        self._saved_evaluation: int | None = None  # its ``evaluated_step``
        self._writing: asyncio.Task[None] | None = None
        self._failures: list[CheckpointError] = []  # in a row

    async def restore(self, resume_from: NewestCheckpoint | None) -> RecordedGroups:
        """Continue from a checkpoint and its journal; without a checkpoint, from the journal alone.

        None starts anew. Returns the recorded rollouts that groups continue with.
        """
        state, journals = self._state, self._parts.journals
        groups, mark = SavedGroups(), 0
        if resume_from is not None and resume_from.path is not None:
            document = await self._parts.trainer.load_checkpoint(resume_from.path)
            mark = document.get(JOURNAL_MARK, 0)
            groups = groups_from_bytes(
                await asyncio.to_thread(load_attachment, resume_from.path, GROUPS)
            )
            self._load(document, groups)
            state.recorder.say(f"resumed after step {state.step} from {resume_from.path}")
        rollouts: Mapping[str, RecordedRollout] = {}
        if resume_from is not None:
            rollouts = journals.restore(state.step, groups.rollouts, mark=mark)
        self._recorded = RecordedGroups(
            rollouts,
            restored_version=state.version,
            admitted_versions={entry.group_id: entry.admitted_version for entry in groups.entries},
        )
        journals.start_lineage(
            state.step, self._recorded.rollouts, groups.rollouts, version=state.version, mark=mark
        )
        return self._recorded

    async def save(self) -> None:
        """Copy the run as it is now; returns when training may continue.

        The files are complete after `finish`. A checkpoint that cannot be written is reported, and
        the next one is tried.

        Raises:
            CheckpointError: too many in a row could not be written.
        """
        await self._wait_until_written()
        step = self._state.step
        if self._saved_step == step:
            return
        try:
            await self._copy(step)
        except CheckpointError as error:
            self._note_failure(step, error)
        else:
            complete = self._complete(step, self._state.evaluated_step)
            self._writing = asyncio.create_task(complete, name=f"checkpoint {step}")
        if len(self._failures) >= self._max_failures:
            raise CheckpointError(
                f"{len(self._failures)} checkpoints in a row could not be written "
                f"(checkpoint.max_failures); the last: {self._failures[-1]}"
            ) from self._failures[-1]

    async def finish(self) -> None:
        """Save the run as it is now, whatever failed before; returns when it is on disk.

        Raises:
            CheckpointError: it could not be written.
            OutputError: a row could not be written.
        """
        await self._wait_until_written()
        self._failures.clear()
        self._state.recorder.flush()
        if self._state.buffer.entries or self._saved_evaluation != self._state.evaluated_step:
            self._saved_step = None  # more than the last checkpoint of this step holds
        await self.save()
        await self._wait_until_written()
        if self._failures:
            raise self._failures[-1]

    async def _wait_until_written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._state.waits.track("a checkpoint is being written"):
                await writing

    async def _copy(self, step: int) -> None:
        with self._state.recorder.phase("checkpoint"):
            # At staleness 0 a resumed run samples running turns again, bit for bit, from the same
            # weights and seeds; continuing them in the middle would draw other tokens.
            partials = await self._parts.router.partials() if self._state.capacity.staleness else {}
            # No await from here until the trainer is called: all of it is of one moment.
            document, groups = self._document(), self._groups(partials)
            version = document["version"]
            try:
                self._state.recorder.flush()
                document[JOURNAL_MARK] = self._parts.journals.begin(step, version=version)
                self._append_untaken()
            except (OutputError, JournalError) as error:
                raise CheckpointError(f"checkpoint {step}: {error}") from error
            await self._parts.trainer.save_checkpoint(
                self._parts.checkpoints.path(step), document, {GROUPS: groups}, version=version
            )

    def _append_untaken(self) -> None:
        """Recorded turns of groups that are not admitted yet go into the new journal."""
        for name, recorded in self._recorded.rollouts.items():
            if group_of(name) not in self._state.buffer:
                for index, turn in enumerate(recorded.turns):
                    state = recorded.env_states.get(index + 1)
                    self._parts.journals.append(name, index, turn, state)

    async def _complete(self, step: int, evaluation: int | None) -> None:
        try:
            await self._parts.trainer.finish_checkpoint()
        except CheckpointError as error:
            self._note_failure(step, error)
            return
        self._saved_step, self._saved_evaluation = step, evaluation
        self._failures.clear()
        checkpoints = self._parts.checkpoints
        try:
            await asyncio.to_thread(checkpoints.prune, self._keep)
            self._parts.journals.prune(checkpoints.steps()[0])
        except (OSError, CheckpointError) as error:
            self._state.recorder.say(f"old checkpoints could not be removed: {error}")

    def _note_failure(self, step: int, error: CheckpointError) -> None:
        self._failures.append(error)
        self._state.recorder.say(
            f"NO CHECKPOINT of step {step} ({len(self._failures)} failed in a row, of "
            f"{self._max_failures} that end the run): {error}"
        )

    def _document(self) -> dict[str, Any]:
        state = self._state
        unfinished = {entry.group_id for entry in state.buffer.entries if entry.group is None}
        return {
            "identity": dict(self._parts.identity),
            "step": state.step,
            "version": state.version,
            "evaluated_step": state.evaluated_step,
            "dataset": self._parts.dataset.state_dict(),
            "ledger": state.ledger.state_dict(without=unfinished),
        }

    def _groups(self, partials: Mapping[str, Completion]) -> bytes:
        entries = self._state.buffer.entries
        unfinished = {
            entry.group_id: self._parts.rollouter.snapshot(entry.group_id, partials)
            if entry.state is GroupState.RUNNING
            else self._recorded.of_group(entry.group_id)
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
        state.buffer.restore(groups.entries)
        self._parts.dataset.load_state_dict(document["dataset"])
