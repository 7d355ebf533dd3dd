"""Saves a whole run while it continues, and restores it.

The controller adds two attachments to each checkpoint: the run's position (`RunPosition`), and all
untrained groups, with the recorded rollouts of unfinished groups.

Invariants
- A checkpoint contains the state of one moment: trainer, dataset position and every untrained
  group. Turns that finish after that moment are in the journal (`journal.py`).
- A failed write does not change earlier checkpoints and their turns in the journal.
- A sampled turn is sampled again only if its tokens have a version that the restored trainer has
  not reached, or a version that the turn's group may not use. Such tokens are counted as discarded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from torchtitan_rl.aio import BackgroundTask
from torchtitan_rl.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    OutputError,
    TorchtitanRLError,
    TrainerLostError,
    one_line,
)
from torchtitan_rl.orchestration.config import CheckpointConfig
from torchtitan_rl.orchestration.journal import Journal, JournalError, JournalUnreadableError
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import group_of
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.work_buffer import Entry, GroupState
from torchtitan_rl.rollout.records import (
    RecordedRollout,
    SavedRollout,
    restored_rollout,
    saved_rollout,
    short_group,
    to_bytes,
    usable_turns,
    whole_group,
)
from torchtitan_rl.rollout.task import Outcome
from torchtitan_rl.training.checkpoint_files import (
    CheckpointUnreadableError,
    attachments_of,
    load_attachment,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint, step_of
from torchtitan_rl.types import Completion

_Moment = tuple[int, int | None]  # step, newest evaluated step


class RunCheckpointer:
    """Writes one checkpoint at a time and keeps the newest. The run fails after
    ``max_failures`` checkpoints in a row that could not be written."""

    def __init__(self, state: RunState, config: CheckpointConfig) -> None:
        self._state = state
        self._parts = state.parts
        self._keep = config.keep
        self._max_failures = config.max_failures
        self._recorded = RecordedGroups()
        self._saved: _Moment | None = None  # the moment of the newest complete checkpoint
        self._writing = BackgroundTask()
        self._failures: list[CheckpointError] = []  # in a row

    async def restore(self, resume_from: NewestCheckpoint | None) -> RecordedGroups:
        """Restore the run from a checkpoint and the journal, and return the recorded rollouts, with
        which groups continue.

        If ``resume_from.path`` is None, the run continues from the journal alone. If
        ``resume_from`` is None, a new run begins.
        """
        state, journal = self._state, self._parts.journal
        saved = SavedRun()
        if resume_from is not None and resume_from.path is not None:
            await self._parts.trainer.load_checkpoint(resume_from.path)
            saved = await asyncio.to_thread(read_saved_run, resume_from.path)
            position = saved.position
            state.step, state.version = position.step, position.version
            state.evaluated_step = position.evaluated_step
            state.ledger.load_state_dict(position.ledger)
            state.buffer.restore(saved.entries)
            state.parts.dataset.load_state_dict(json.loads(position.dataset))
            state.skipped = list(position.skipped)
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
        """Copy the run's current state, and write it in the background. Returns when training may
        continue; the files are complete after the next `save` or `finish`.

        A checkpoint that cannot be written is reported; the run continues.

        Raises:
            CheckpointError: ``max_failures`` checkpoints in a row could not be written.
        """
        await self._wait_until_written()
        if self._saved is None or self._saved[0] != self._state.step:
            await self._begin()

    async def finish(self) -> None:
        """Save the run's current state, even after a failure, and wait until it is on disk. If the
        trainer is lost while it writes, the one that takes its place writes it.

        Raises:
            CheckpointError: the checkpoint could not be written.
            OutputError: a row could not be written.
        """
        await self._wait_until_written()
        self._failures.clear()
        self._state.recorder.flush()
        if self._saved == self._moment() and not self._state.buffer.entries:
            return
        while True:
            await self._begin()
            await self._wait_until_written()
            if not self._failures:
                return
            error = self._failures.pop()
            if not isinstance(error.__cause__, (TrainerLostError, DeadlineError)):
                raise error

    def _moment(self) -> _Moment:
        return self._state.step, self._state.evaluated_step

    async def _wait_until_written(self) -> None:
        with self._state.waits.track("a checkpoint is being written"):
            await self._writing.wait()

    async def _begin(self) -> None:
        step = self._state.step
        self._check_failures()
        try:
            moment = await self._copy(step)
        except CheckpointError as error:
            self._record_failure(step, error)
            self._check_failures()
        else:
            self._writing.start(f"checkpoint {step}", self._complete, moment)

    def _check_failures(self) -> None:
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
            # No await from here until the trainer is called, so that all parts have the same
            # moment.
            moment = self._moment()
            try:
                state.recorder.flush()
                mark = self._parts.journal.begin(step, version=state.version)
                for name, recorded in self._recorded.rollouts.items():
                    if group_of(name) not in state.buffer:  # not admitted again yet
                        self._parts.journal.append(recorded, 0)
            except (OutputError, JournalError) as error:
                raise CheckpointError(f"checkpoint {step}: {error}") from error
            attachments = {
                POSITION: to_bytes(self._position(mark)),
                GROUPS: to_bytes(self._groups(partials)),
            }
            with state.waits.track(f"the trainer copies its state for checkpoint {step}"):
                await self._parts.trainer.save_checkpoint(
                    self._parts.checkpoints.path(step), attachments, version=state.version
                )
        return moment

    def _position(self, journal_mark: int) -> RunPosition:
        state = self._state
        unfinished = {entry.group_id for entry in state.buffer.entries if entry.group is None}
        return RunPosition(
            step=state.step,
            version=state.version,
            evaluated_step=state.evaluated_step,
            identity=self._parts.identity,
            dataset=json.dumps(self._parts.dataset.state_dict()),
            skipped=tuple(state.skipped),
            ledger=state.ledger.state_dict(without=unfinished),
            journal_mark=journal_mark,
        )

    def _groups(self, partials: Mapping[str, Completion]) -> tuple[list[Entry], list[SavedRollout]]:
        """Return the groups, the running ones as waiting, and the recorded rollouts."""
        entries: list[Entry] = []
        recorded: list[RecordedRollout] = []
        for entry in self._state.buffer.entries:
            state, group = GroupState.WAITING, entry.group
            if group is not None:
                state, group = GroupState.FINISHED, short_group(group)
            elif entry.state is GroupState.RUNNING:
                recorded += self._parts.rollouter.snapshot(entry.group_id, partials)
            else:
                recorded += self._recorded.of_group(entry.group_id)
            entries.append(replace(entry, state=state, group=group))
        return entries, list(map(saved_rollout, recorded))

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


POSITION, GROUPS = "position-5.msgpack", "groups-5.msgpack"
"""The attachments' names, which contain the format. Earlier formats are not read any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """The position of a run. ``skipped`` has the outcomes that the dataset has not recorded yet.
    Journal rows from ``journal_mark`` on are newer than the checkpoint."""

    step: int = 0
    version: int = 0
    evaluated_step: int | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = "null"  # JSON, which has integers of any size
    skipped: tuple[Outcome, ...] = ()
    ledger: Mapping[str, Any] = field(default_factory=dict)
    journal_mark: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """The controller's part of a checkpoint; without arguments, the start of a new run.
    ``rollouts`` are those of unfinished groups, by id."""

    position: RunPosition = field(default_factory=RunPosition)
    entries: tuple[Entry, ...] = ()
    rollouts: Mapping[str, RecordedRollout] = field(default_factory=dict)


def read_position(path: Path) -> RunPosition:
    """Read the run's position at the moment of the checkpoint.

    Raises:
        ConfigError: an older version of the system wrote the checkpoint.
        CheckpointError: the attachment is damaged.
        msgspec.DecodeError: the attachment has another content.
    """
    if POSITION not in attachments_of(path):
        raise ConfigError(
            f"checkpoint.resume: {path} is of an earlier version of torchtitan-rl, whose format is "
            "not read any more: finish the run with that version, or start one of another name"
        )
    return msgspec.msgpack.decode(load_attachment(path, POSITION), type=RunPosition)


def read_saved_run(path: Path) -> SavedRun:
    """Read the controller's part of a complete checkpoint.

    Raises:
        ConfigError, CheckpointError, msgspec.DecodeError: see `read_position`.
        ValueError: a prompt extends a turn that is missing.
    """
    position = read_position(path)
    entries, recorded = _GROUPS.decode(load_attachment(path, GROUPS))
    return SavedRun(
        position=position,
        entries=tuple(
            replace(one, group=None if one.group is None else whole_group(one.group))
            for one in entries
        ),
        rollouts={one.rollout_id: one for one in map(restored_rollout, recorded)},
    )


_GROUPS = msgspec.msgpack.Decoder(tuple[tuple[Entry, ...], tuple[SavedRollout, ...]])


def choose_checkpoint(checkpoints: CheckpointDirectory, journal: Journal) -> NewestCheckpoint:
    """Find the newest checkpoint whose parts can all be read and fit together, before any process
    of the run starts.

    Newer, unusable checkpoints are set aside, with the reason in ``passed_over``. ``path`` is None
    if no checkpoint was ever written: the run then continues from its journal.

    Raises, and changes nothing:
        ConfigError: an older version of the system wrote a checkpoint.
        CheckpointError: there are checkpoints but none is usable, or a newer one cannot be read.
    """
    found = checkpoints.choose(lambda path: why_not_resumable(path, journal), checksums=True)
    if found.path is None:
        return found
    return replace(found, passed_over=(*found.passed_over, *journal.passed_over))


def why_not_resumable(path: Path, journal: Journal) -> str | None:
    """Return the reason why a run cannot resume from a complete checkpoint; None if it can. Raises
    ConfigError as `read_position`, and CheckpointUnreadableError if the operating system cannot
    read a file."""
    try:
        saved, step = read_saved_run(path), step_of(path)
        position = saved.position
        if position.step != step:
            return f"its attachments are of step {position.step}"
        TokenLedger().load_state_dict(position.ledger)
        journal.restore(step, saved.rollouts, mark=position.journal_mark)
    except (ConfigError, CheckpointUnreadableError):
        raise
    except JournalUnreadableError as error:
        raise CheckpointUnreadableError(f"the journal of {path} cannot be read: {error}") from error
    except TorchtitanRLError as error:
        return one_line(error)
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        return f"not as this version writes it ({error!r})"
    return None


class RecordedGroups:
    """The recorded rollouts of a resumed run, until their groups start and take them.

    ``entries`` are the groups in the checkpoint. The rollouts of other groups, which began after
    it, can be used if these groups are admitted at ``restored_version`` again.
    """

    def __init__(
        self,
        rollouts: Mapping[str, RecordedRollout] | None = None,
        entries: Iterable[Entry] = (),
        *,
        restored_version: int = 0,
    ) -> None:
        self._groups: dict[str, dict[str, RecordedRollout]] = {}
        self._rolled_back: dict[str, int] = {}  # number of unusable tokens, by group
        self._restored_version = restored_version
        admitted_versions = {entry.group_id: entry.admitted_version for entry in entries}
        for name, recorded in (rollouts or {}).items():
            group_id = group_of(name)
            usable, lost = usable_turns(
                recorded,
                restored_version=restored_version,
                admitted_version=admitted_versions.get(group_id, restored_version),
            )
            self._groups.setdefault(group_id, {})[name] = usable
            self._rolled_back[group_id] = self._rolled_back.get(group_id, 0) + lost

    @property
    def rollouts(self) -> dict[str, RecordedRollout]:
        """All recorded rollouts that have not been taken, by id."""
        return {name: one for group in self._groups.values() for name, one in group.items()}

    def of_group(self, group_id: str) -> tuple[RecordedRollout, ...]:
        """Return the recorded rollouts of one group that have not been taken."""
        return tuple(self._groups.get(group_id, {}).values())

    def pop(
        self, group_id: str, *, admitted_version: int
    ) -> tuple[Mapping[str, RecordedRollout], int]:
        """Take the rollouts with which a group continues. Also returns how many of the group's
        recorded tokens are rolled back."""
        usable = self._groups.pop(group_id, {})
        rolled_back = self._rolled_back.pop(group_id, 0)
        if admitted_version > self._restored_version:
            return {}, rolled_back + sum(one.num_tokens for one in usable.values())
        return usable, rolled_back
