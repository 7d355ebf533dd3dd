"""The untrained groups of a checkpoint: to bytes, back again, and on with their rollouts.

Invariant: a turn that was sampled is never sampled again, unless its tokens are of a version that
the restored trainer has not reached, or that its group may not use; those are counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroups:
    """``rollouts`` are those of unfinished groups, by their ids."""

    entries: tuple[Entry, ...] = ()
    rollouts: Mapping[str, RecordedRollout] = field(default_factory=dict)


def groups_to_bytes(
    entries: Sequence[Entry], running: Mapping[str, Sequence[RecordedRollout]]
) -> bytes:
    """One JSON line a group; ``running`` has the rollouts of each unfinished one that began."""
    lines = [
        json.dumps(_entry_to_json(entry, running.get(entry.group_id, ())), separators=(",", ":"))
        for entry in entries
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def groups_from_bytes(data: bytes) -> SavedGroups:
    """What `groups_to_bytes` wrote. Groups that were not finished are waiting again."""
    rows = [json.loads(line) for line in data.splitlines()]
    rollouts = [recorded_from_json(one) for row in rows for one in row["rollouts"]]
    return SavedGroups(
        entries=tuple(_entry_from_json(row) for row in rows),
        rollouts={one.rollout_id: one for one in rollouts},
    )


class RecordedGroups:
    """The recorded rollouts that a resumed run goes on with, until their groups ask for them.

    Args:
        admitted_versions: of the restored groups. Others began after the checkpoint, and may be
            used where they are admitted at ``restored_version`` once more.
    """

    def __init__(
        self,
        rollouts: Mapping[str, RecordedRollout] | None = None,
        *,
        restored_version: int = 0,
        admitted_versions: Mapping[str, int] | None = None,
    ) -> None:
        self._groups: dict[str, dict[str, RecordedRollout]] = {}
        self._rolled_back: dict[str, int] = {}
        self._restored_version = restored_version
        known = admitted_versions or {}
        for name, recorded in (rollouts or {}).items():
            group_id = name.rsplit("/", 1)[0]
            usable, lost = usable_turns(
                recorded,
                restored_version=restored_version,
                admitted_version=known.get(group_id, restored_version),
            )
            self._groups.setdefault(group_id, {})[name] = usable
            self._rolled_back[group_id] = self._rolled_back.get(group_id, 0) + lost

    @property
    def rollouts(self) -> dict[str, RecordedRollout]:
        """All that may be used."""
        return {name: one for group in self._groups.values() for name, one in group.items()}

    def waiting(self, group_id: str) -> tuple[RecordedRollout, ...]:
        """What a group has not asked for yet."""
        return tuple(self._groups.get(group_id, {}).values())

    def take(
        self, group_id: str, *, admitted_version: int
    ) -> tuple[Mapping[str, RecordedRollout], int]:
        """What a group goes on with, once, and how many of its tokens are rolled back."""
        usable = self._groups.pop(group_id, {})
        rolled_back = self._rolled_back.pop(group_id, 0)
        if admitted_version > self._restored_version:
            return {}, rolled_back + sum(one.num_tokens for one in usable.values())
        return usable, rolled_back


def _entry_to_json(entry: Entry, rollouts: Sequence[RecordedRollout]) -> dict[str, Any]:
    return {
        "group_id": entry.group_id,
        "problem": problem_to_json(entry.problem),
        "admitted_version": entry.admitted_version,
        "overtaken": entry.overtaken,
        "restarts": entry.restarts,
        "resamples": entry.resamples,
        "group": None if entry.group is None else group_to_json(entry.group),
        "rollouts": [recorded_to_json(one) for one in rollouts],
    }


def _entry_from_json(row: Mapping[str, Any]) -> Entry:
    group = None if row["group"] is None else group_from_json(row["group"])
    return Entry(
        group_id=row["group_id"],
        problem=problem_from_json(row["problem"]),
        admitted_version=row["admitted_version"],
        state=GroupState.WAITING if group is None else GroupState.FINISHED,
        overtaken=row["overtaken"],
        restarts=row["restarts"],
        resamples=row["resamples"],
        group=group,
    )
