"""How a run continues: which checkpoint it resumes from, its groups, and their recorded turns.

Invariant: a sampled turn is never sampled again, unless its tokens are of a version that the
restored trainer has not reached, or that its group may not use; those tokens are counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.orchestration.ids import group_of
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.work_buffer import Entry, GroupState
from torchtitan_rl.rollout.recorded import RecordedRollout, usable_turns
from torchtitan_rl.rollout.records import (
    group_from_json,
    group_to_json,
    problem_from_json,
    problem_to_json,
    recorded_from_json,
    recorded_to_json,
)
from torchtitan_rl.training.checkpoint_files import (
    CheckpointUnreadableError,
    load_attachment,
    read_document,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint, step_of

GROUPS = "groups.jsonl"
"""The attachment of a checkpoint that holds its groups."""

JOURNAL_MARK = "journal_mark"
"""Key of the document: the mark in the journal after which lines are newer than the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroups:
    """The untrained groups of a checkpoint; ``rollouts`` are those of unfinished groups, by id."""

    entries: tuple[Entry, ...] = ()
    rollouts: Mapping[str, RecordedRollout] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """What the controller saved in a checkpoint."""

    document: Mapping[str, Any]
    groups: SavedGroups
    journal_mark: int


def read_saved_run(path: Path) -> SavedRun:
    """Read the controller's part of a complete checkpoint.

    Raises:
        TorchtitanRLError, ValueError, KeyError, TypeError, IndexError: it was not written by this
            version.
    """
    marker = read_document(path)
    document = marker.get("extra", marker)
    return SavedRun(
        document=document,
        groups=groups_from_bytes(load_attachment(path, GROUPS)),
        journal_mark=document.get(JOURNAL_MARK, 0),
    )


def choose_checkpoint(
    checkpoints: CheckpointDirectory, journals: JournalDirectory, *, checksums: bool = True
) -> NewestCheckpoint:
    """The newest checkpoint of which every part can be read and fits. Call before a process starts.

    Newer ones are set aside, with the reason in ``passed_over``. ``path`` is None where there never
    was a checkpoint: the run continues from its journal.

    Raises:
        CheckpointError: there are checkpoints but none can be used, or a newer one cannot be read.
            Nothing is changed.
    """
    found = checkpoints.choose(lambda path: why_not_resumable(path, journals), checksums=checksums)
    if found.path is None:
        return found
    return replace(found, passed_over=(*found.passed_over, *journals.passed_over))


def why_not_resumable(path: Path, journals: JournalDirectory) -> str | None:
    """What of a complete checkpoint is wrong, or does not fit its journal; None if it is usable.

    Raises:
        CheckpointUnreadableError: the system cannot read a file of it, or of its journal.
    """
    try:
        saved, step = read_saved_run(path), step_of(path)
        if saved.document["step"] != step:
            return f"its document is of step {saved.document['step']}"
        TokenLedger().load_state_dict(saved.document["ledger"])
        journals.restore(step, saved.groups.rollouts, mark=saved.journal_mark)
    except CheckpointUnreadableError:
        raise
    except OSError as error:
        raise CheckpointUnreadableError(f"the journal of {path} cannot be read: {error}") from error
    except TorchtitanRLError as error:
        return f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"not as this version writes it ({error!r})"
    return None


def groups_to_bytes(
    entries: Sequence[Entry], running: Mapping[str, Sequence[RecordedRollout]]
) -> bytes:
    """One JSON line per group, with the rollouts of ``running`` for the unfinished ones."""
    lines = [
        json.dumps(_entry_to_json(entry, running.get(entry.group_id, ())), separators=(",", ":"))
        for entry in entries
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def groups_from_bytes(data: bytes) -> SavedGroups:
    """What `groups_to_bytes` wrote; groups that were not finished are waiting again."""
    rows = [json.loads(line) for line in data.splitlines()]
    rollouts = [recorded_from_json(one) for row in rows for one in row["rollouts"]]
    return SavedGroups(
        entries=tuple(_entry_from_json(row) for row in rows),
        rollouts={one.rollout_id: one for one in rollouts},
    )


class RecordedGroups:
    """The recorded rollouts of a resumed run, until their groups start and take them.

    Args:
        admitted_versions: those of the groups in the checkpoint. Other groups began after it; their
            rollouts can be used if they are admitted at ``restored_version`` again.
    """

    def __init__(
        self,
        rollouts: Mapping[str, RecordedRollout] | None = None,
        *,
        restored_version: int = 0,
        admitted_versions: Mapping[str, int] | None = None,
    ) -> None:
        self._groups: dict[str, dict[str, RecordedRollout]] = {}
        self._rolled_back: dict[str, int] = {}  # unusable tokens
        self._restored_version = restored_version
        admitted_versions = admitted_versions or {}
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

    def take(
        self, group_id: str, *, admitted_version: int
    ) -> tuple[Mapping[str, RecordedRollout], int]:
        """The rollouts that a group continues with, and how many of its tokens are rolled back."""
        usable = self._groups.pop(group_id, {})
        rolled_back = self._rolled_back.pop(group_id, 0)
        if admitted_version > self._restored_version:
            return {}, rolled_back + sum(one.num_tokens for one in usable.values())
        return usable, rolled_back


_PLAIN_FIELDS = ("group_id", "admitted_version", "overtaken", "restarts", "resamples")


def _entry_to_json(entry: Entry, rollouts: Sequence[RecordedRollout]) -> dict[str, Any]:
    return {
        **{name: getattr(entry, name) for name in _PLAIN_FIELDS},
        "problem": problem_to_json(entry.problem),
        "group": None if entry.group is None else group_to_json(entry.group),
        "rollouts": [recorded_to_json(one) for one in rollouts],
    }


def _entry_from_json(row: Mapping[str, Any]) -> Entry:
    group = None if row["group"] is None else group_from_json(row["group"])
    return Entry(
        **{name: row[name] for name in _PLAIN_FIELDS},
        problem=problem_from_json(row["problem"]),
        state=GroupState.WAITING if group is None else GroupState.FINISHED,
        group=group,
    )
