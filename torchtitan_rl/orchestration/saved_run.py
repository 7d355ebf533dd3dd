"""What the controller saves in a checkpoint, in memory and on disk.

- The document, JSON in the marker: step, version, newest evaluated step, dataset position, skipped
  groups that the dataset does not know of yet, ledger, identity of the run, and the mark in the
  journal.
- The attachment ``groups.jsonl``: a line for each untrained group, with the rollouts of those that
  are not finished, which are waiting again when they are read.

Turns that finish after the checkpoint are in the journal (`journal.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.work_buffer import Entry, GroupState
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.rollout.records import (
    group_from_json,
    group_to_json,
    problem_from_json,
    problem_to_json,
    recorded_from_json,
    recorded_to_json,
)
from torchtitan_rl.rollout.task import Outcome
from torchtitan_rl.training.checkpoint_files import load_attachment, read_document

GROUPS = "groups.jsonl"
"""The attachment that holds the groups."""

_PLAIN_FIELDS = ("group_id", "admitted_version", "overtaken", "restarts", "resamples")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroups:
    """The untrained groups of a checkpoint; ``rollouts`` are those of unfinished groups, by id."""

    entries: tuple[Entry, ...] = ()
    rollouts: Mapping[str, RecordedRollout] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """The controller's part of a checkpoint; without arguments, of a run that has none."""

    document: Mapping[str, Any] = field(default_factory=dict)
    groups: SavedGroups = field(default_factory=SavedGroups)

    @property
    def journal_mark(self) -> int:
        """The mark in the journal after which lines are newer than the checkpoint."""
        return int(self.document.get("journal_mark", 0))

    def load_into(self, state: RunState) -> None:
        """Put a run that has not begun into the saved state."""
        document = self.document
        state.step = document["step"]
        state.version = document["version"]
        state.evaluated_step = document["evaluated_step"]
        state.ledger.load_state_dict(document["ledger"])
        state.buffer.restore(self.groups.entries)
        state.parts.dataset.load_state_dict(document["dataset"])
        state.skipped = [
            Outcome(problem=problem_from_json(one["problem"]), solved=one["solved"])
            for one in document.get("skipped", ())
        ]


def document_of(state: RunState, *, journal_mark: int) -> dict[str, Any]:
    """The document of the run as it is now."""
    unfinished = {entry.group_id for entry in state.buffer.entries if entry.group is None}
    return {
        "identity": dict(state.parts.identity),
        "step": state.step,
        "version": state.version,
        "evaluated_step": state.evaluated_step,
        "dataset": state.parts.dataset.state_dict(),
        "skipped": [
            {"problem": problem_to_json(one.problem), "solved": one.solved} for one in state.skipped
        ],
        "ledger": state.ledger.state_dict(without=unfinished),
        "journal_mark": journal_mark,
    }


def read_saved_run(path: Path) -> SavedRun:
    """Read the controller's part of a complete checkpoint.

    Raises:
        TorchtitanRLError, ValueError, KeyError, TypeError, IndexError: it was not written by this
            version.
    """
    marker = read_document(path)
    return SavedRun(
        document=marker.get("extra", marker),
        groups=groups_from_bytes(load_attachment(path, GROUPS)),
    )


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
    """What `groups_to_bytes` wrote."""
    rows = [json.loads(line) for line in data.splitlines()]
    rollouts = [recorded_from_json(one) for row in rows for one in row["rollouts"]]
    return SavedGroups(
        entries=tuple(_entry_from_json(row) for row in rows),
        rollouts={one.rollout_id: one for one in rollouts},
    )


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
