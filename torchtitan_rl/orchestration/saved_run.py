"""What the controller saves in a checkpoint, and how a run continues from it.

A checkpoint has two attachments of the controller: where the run is (`RunPosition`), and every
untrained group, with the rollouts of those that are not finished. Turns that finish after the
checkpoint are in the journal (`journal.py`).

Invariant: a sampled turn is never sampled again, unless its tokens are of a version that the
restored trainer has not reached, or that its group may not use; those tokens are counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from torchtitan_rl.errors import ConfigError, TorchtitanRLError, one_line
from torchtitan_rl.orchestration.journal import Journal, JournalUnreadableError
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import group_of
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.work_buffer import Entry, GroupState
from torchtitan_rl.rollout.recorded import RecordedRollout, usable_turns
from torchtitan_rl.rollout.records import (
    SavedRollout,
    restored_rollout,
    saved_rollout,
    short_group,
    to_bytes,
    whole_group,
)
from torchtitan_rl.rollout.task import Outcome
from torchtitan_rl.training.checkpoint_files import (
    CheckpointUnreadableError,
    attachments_of,
    load_attachment,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint, step_of

POSITION, GROUPS = "position-3.msgpack", "groups-3.msgpack"
"""The attachments, named by their format. Formats 1 and 2 were JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """Where a run is. ``skipped`` are outcomes that the dataset does not know of yet; rows of the
    journal from ``journal_mark`` on are newer than the checkpoint."""

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
    """The controller's part of a checkpoint; without arguments, of a run that has none.
    ``rollouts`` are those of unfinished groups, by id."""

    position: RunPosition = field(default_factory=RunPosition)
    entries: tuple[Entry, ...] = ()
    rollouts: Mapping[str, RecordedRollout] = field(default_factory=dict)

    def load_into(self, state: RunState) -> None:
        """Put a run that has not begun into the saved state."""
        position = self.position
        state.step, state.version = position.step, position.version
        state.evaluated_step = position.evaluated_step
        state.ledger.load_state_dict(position.ledger)
        state.buffer.restore(self.entries)
        state.parts.dataset.load_state_dict(json.loads(position.dataset))
        state.skipped = list(position.skipped)


def position_to_bytes(state: RunState, *, journal_mark: int) -> bytes:
    """Where the run is now."""
    unfinished = {entry.group_id for entry in state.buffer.entries if entry.group is None}
    position = RunPosition(
        step=state.step,
        version=state.version,
        evaluated_step=state.evaluated_step,
        identity=state.parts.identity,
        dataset=json.dumps(state.parts.dataset.state_dict()),
        skipped=tuple(state.skipped),
        ledger=state.ledger.state_dict(without=unfinished),
        journal_mark=journal_mark,
    )
    return to_bytes(position)


def groups_to_bytes(entries: Iterable[Entry], recorded: Iterable[RecordedRollout]) -> bytes:
    """The groups, which are finished or waiting when they are read."""
    saved = [
        replace(
            entry,
            state=GroupState.WAITING if entry.group is None else GroupState.FINISHED,
            group=None if entry.group is None else short_group(entry.group),
        )
        for entry in entries
    ]
    return to_bytes((saved, [saved_rollout(one) for one in recorded]))


def read_position(path: Path) -> RunPosition:
    """Where the run was when the checkpoint was saved.

    Raises:
        ConfigError: an older version of the system wrote the checkpoint.
        CheckpointError: the attachment is damaged.
        msgspec.DecodeError: it was not written by `position_to_bytes`.
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
        ConfigError, CheckpointError, msgspec.DecodeError: as `read_position`.
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
        rollouts={one.rollout_id: restored_rollout(one) for one in recorded},
    )


_GROUPS = msgspec.msgpack.Decoder(tuple[tuple[Entry, ...], tuple[SavedRollout, ...]])


def choose_checkpoint(
    checkpoints: CheckpointDirectory, journal: Journal, *, checksums: bool = True
) -> NewestCheckpoint:
    """The newest checkpoint of which every part can be read and fits. Call before a process starts.

    Newer ones are set aside, with the reason in ``passed_over``. ``path`` is None where there never
    was a checkpoint: the run continues from its journal.

    Raises:
        ConfigError: an older version of the system wrote a checkpoint. Nothing is changed.
        CheckpointError: there are checkpoints but none can be used, or a newer one cannot be read.
            Nothing is changed.
    """
    found = checkpoints.choose(lambda path: why_not_resumable(path, journal), checksums=checksums)
    if found.path is None:
        return found
    return replace(found, passed_over=(*found.passed_over, *journal.passed_over))


def why_not_resumable(path: Path, journal: Journal) -> str | None:
    """What is wrong with a complete checkpoint; None if a run can resume from it.

    Raises:
        ConfigError: an older version of the system wrote it.
        CheckpointUnreadableError: the system cannot read a file of it, or the journal.
    """
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

    Args:
        entries: the groups in the checkpoint. Other groups began after it; their rollouts can be
            used if they are admitted at ``restored_version`` again.
    """

    def __init__(
        self,
        rollouts: Mapping[str, RecordedRollout] | None = None,
        entries: Iterable[Entry] = (),
        *,
        restored_version: int = 0,
    ) -> None:
        self._groups: dict[str, dict[str, RecordedRollout]] = {}
        self._rolled_back: dict[str, int] = {}  # unusable tokens
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
        """All that have not been taken."""
        return {name: one for group in self._groups.values() for name, one in group.items()}

    def of_group(self, group_id: str) -> tuple[RecordedRollout, ...]:
        """Those of one group that have not been taken."""
        return tuple(self._groups.get(group_id, {}).values())

    def pop(
        self, group_id: str, *, admitted_version: int
    ) -> tuple[Mapping[str, RecordedRollout], int]:
        """The rollouts that a group continues with, and how many of its tokens are rolled back."""
        usable = self._groups.pop(group_id, {})
        rolled_back = self._rolled_back.pop(group_id, 0)
        if admitted_version > self._restored_version:
            return {}, rolled_back + sum(one.num_tokens for one in usable.values())
        return usable, rolled_back
