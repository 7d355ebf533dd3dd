"""Saves a whole run while it continues, and restores it. `saved_run.py` says what is saved.

Invariants: a checkpoint holds the state of one moment: trainer, dataset position and every
untrained group. Turns that finish after that moment are in the journal. A failed write leaves
earlier checkpoints and their turns in the journal as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import chain

from torchtitan_rl.aio import BackgroundTask
from torchtitan_rl.errors import CheckpointError, OutputError
from torchtitan_rl.orchestration.journal import JournalError
from torchtitan_rl.orchestration.records import group_of
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.saved_run import (
    GROUPS,
    POSITION,
    RecordedGroups,
    SavedRun,
    groups_to_bytes,
    position_to_bytes,
    read_saved_run,
)
from torchtitan_rl.orchestration.work_buffer import GroupState
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.training.checkpoints import NewestCheckpoint
from torchtitan_rl.types import Completion

_Moment = tuple[int, int | None]  # step, newest evaluated step


class RunCheckpointer:
    """Writes one checkpoint at a time and keeps the ``keep`` newest. The run fails after
    ``max_failures`` checkpoints in a row that could not be written."""

    def __init__(self, state: RunState, *, keep: int, max_failures: int) -> None:
        self._state = state
        self._parts = state.parts
        self._keep = keep
        self._max_failures = max_failures
        self._recorded = RecordedGroups()
        self._saved: _Moment | None = None  # of the newest complete checkpoint
        self._writing = BackgroundTask()
        self._failures: list[CheckpointError] = []  # in a row

    async def restore(self, resume_from: NewestCheckpoint | None) -> RecordedGroups:
        """Continue from a checkpoint and its journal; without a checkpoint, from the journal alone.

        None begins a new run. Returns the recorded rollouts that groups continue with.
        """
        state, journal = self._state, self._parts.journal
        saved = SavedRun()
        if resume_from is not None and resume_from.path is not None:
            await self._parts.trainer.load_checkpoint(resume_from.path)
            saved = await asyncio.to_thread(read_saved_run, resume_from.path)
            saved.load_into(state)
            self._saved = self._moment()
            state.recorder.say(f"resumed after step {state.step} from {resume_from.path}")
        mark = saved.position.journal_mark
        rollouts: Mapping[str, RecordedRollout] = {}
        self._parts.claim.check()
        if resume_from is not None:
            rollouts = journal.restore(state.step, saved.rollouts, mark=mark)
        self._recorded = RecordedGroups(rollouts, saved.entries, restored_version=state.version)
        journal.start(
            state.step, self._recorded.rollouts, saved.rollouts, version=state.version, mark=mark
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
        if self._saved is None or self._saved[0] != self._state.step:
            await self._begin()

    async def finish(self) -> None:
        """Save the run as it is now, also after a failure; returns when it is on disk.

        Raises:
            CheckpointError: the checkpoint could not be written.
            OutputError: a row could not be written.
        """
        await self._wait_until_written()
        self._failures.clear()
        self._state.recorder.flush()
        if self._state.buffer.entries or self._saved != self._moment():
            await self._begin()
            await self._wait_until_written()
        if self._failures:
            raise self._failures[-1]

    def _moment(self) -> _Moment:
        return self._state.step, self._state.evaluated_step

    async def _wait_until_written(self) -> None:
        with self._state.waits.track("a checkpoint is being written"):
            await self._writing.wait()

    async def _begin(self) -> None:
        step = self._state.step
        try:
            moment = await self._copy(step)
        except CheckpointError as error:
            self._record_failure(step, error)
        else:
            self._writing.start(f"checkpoint {step}", self._complete, moment)
        if len(self._failures) >= self._max_failures:
            raise CheckpointError(
                f"{len(self._failures)} checkpoints in a row could not be written "
                f"(checkpoint.max_failures); the last: {self._failures[-1]}"
            ) from self._failures[-1]

    async def _copy(self, step: int) -> _Moment:
        state = self._state
        with state.recorder.phase("checkpoint"):
            # At staleness 0 a resumed run samples running turns again, bit for bit, from the same
            # weights and seeds; continuing them in the middle would draw other tokens.
            partials = await self._parts.router.partials() if state.capacity.staleness else {}
            self._parts.claim.check()
            # No await from here until the trainer is called: all of it is of one moment.
            moment = self._moment()
            try:
                state.recorder.flush()
                mark = self._parts.journal.begin(step, version=state.version)
                self._append_untaken()
            except (OutputError, JournalError) as error:
                raise CheckpointError(f"checkpoint {step}: {error}") from error
            await self._parts.trainer.save_checkpoint(
                self._parts.checkpoints.path(step),
                {
                    POSITION: position_to_bytes(state, journal_mark=mark),
                    GROUPS: self._groups(partials),
                },
                version=state.version,
            )
        return moment

    def _append_untaken(self) -> None:
        """Recorded turns of groups that are not admitted yet go into the new journal."""
        for name, recorded in self._recorded.rollouts.items():
            if group_of(name) not in self._state.buffer:
                self._parts.journal.append(recorded, 0)

    def _groups(self, partials: Mapping[str, Completion]) -> bytes:
        entries = self._state.buffer.entries
        unfinished = [
            self._parts.rollouter.snapshot(entry.group_id, partials)
            if entry.state is GroupState.RUNNING
            else self._recorded.of_group(entry.group_id)
            for entry in entries
            if entry.group is None
        ]
        return groups_to_bytes(entries, chain.from_iterable(unfinished))

    async def _complete(self, moment: _Moment) -> None:
        try:
            await self._parts.trainer.finish_checkpoint()
        except CheckpointError as error:
            self._record_failure(moment[0], error)
            return
        self._saved = moment
        self._failures.clear()
        self._parts.claim.check()
        checkpoints = self._parts.checkpoints
        try:
            await asyncio.to_thread(checkpoints.prune, self._keep)
            self._parts.claim.check()
            await asyncio.to_thread(self._parts.journal.prune, checkpoints.steps()[0])
        except (CheckpointError, JournalError) as error:
            self._state.recorder.say(f"old checkpoints could not be removed: {error}")

    def _record_failure(self, step: int, error: CheckpointError) -> None:
        self._failures.append(error)
        self._state.recorder.say(
            f"NO CHECKPOINT of step {step} ({len(self._failures)} failed in a row, of "
            f"{self._max_failures} that end the run): {error}"
        )
