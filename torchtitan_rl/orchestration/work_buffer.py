"""The groups between dataset and trainer: a state machine without I/O, tasks or clock.

| state | meaning | next state, by |
|---|---|---|
| WAITING | admitted; no replica holds its version yet | RUNNING by `start` |
| RUNNING | its rollouts run | FINISHED by `finish` |
| FINISHED | all its rollouts have ended | BATCHED by `take` |
| BATCHED | in the optimizer step | leaves, trained, by `finish_batch` |

`discard` removes a group from any state. `restart` moves a group from any state but BATCHED to
WAITING. A step that fails ends the run, and its batch is saved as FINISHED groups.

Invariants:
- every group is in exactly one state. A group enters buffer and ledger in the same call, and leaves
  both in the same call. The ledger counts the groups that left;
- no group or token is trained more than S versions after the group's admission
  (`orchestration/config.py` has the proof; `take` checks it);
- `admit` takes a slot; `finish_batch` or `discard` frees it, on every path.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.orchestration.config import Capacity
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import TokenCounts
from torchtitan_rl.types import Problem, RolloutGroup


class GroupState(StrEnum):
    """The state of a group in the buffer; see the table above."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    BATCHED = "batched"


class StalenessError(TorchtitanRLError):
    """A group or token is older than the cap allows, which is a bug."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """One group in the buffer. ``overtaken`` counts the younger groups that were trained before
    it."""

    group_id: str
    problem: Problem
    admitted_version: int
    state: GroupState = GroupState.WAITING
    overtaken: int = 0
    restarts: int = 0  # number of times rolled out again with newer weights (only at S = 0)
    resamples: int = 0  # number of times rolled out again because all rewards were equal
    group: RolloutGroup | None = None  # set from FINISHED on


class WorkBuffer:
    """The groups that are not trained yet, oldest first. ``ledger`` counts the groups that enter
    and leave."""

    def __init__(self, capacity: Capacity, ledger: TokenLedger) -> None:
        self._capacity = capacity
        self._ledger = ledger
        self._entries: dict[str, Entry] = {}
        self._num_finished = 0
        self._blocking: Entry | None = None  # unfinished, and no batch may overtake it

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The groups in the buffer, oldest first."""
        return tuple(self._entries.values())

    @property
    def has_room(self) -> bool:
        return len(self._entries) < self._capacity.buffer

    @property
    def has_batch(self) -> bool:
        """Whether `take` would return a batch."""
        return self._next_batch() is not None

    def counts(self) -> dict[GroupState, int]:
        """Number of groups in each state."""
        live = Counter(entry.state for entry in self._entries.values())
        return {state: live[state] for state in GroupState}

    def admit(self, group_id: str, problem: Problem, *, version: int, resamples: int = 0) -> Entry:
        """Take a slot for a new group, admitted at the newest trained version.

        Raises:
            ValueError: the buffer has no room.
            LedgerError: a group with this id is in the buffer.
        """
        if not self.has_room:
            raise ValueError(f"no room for group {group_id}: {len(self)} are under way")
        self._ledger.admit(group_id)
        entry = Entry(
            group_id=group_id, problem=problem, admitted_version=version, resamples=resamples
        )
        self._entries[group_id] = entry
        return entry

    def start(self, group_id: str) -> None:
        self._move(self._in_state(group_id, GroupState.WAITING), GroupState.RUNNING)

    def finish(self, group: RolloutGroup) -> None:
        entry = self._in_state(group.group_id, GroupState.RUNNING)
        entry.group = group
        self._move(entry, GroupState.FINISHED)

    def discard(self, group_id: str, cause: str) -> None:
        """Drop a group in any state, with its tokens, and free its slot."""
        self._ledger.discard(group_id, cause)
        entry = self._entries.pop(group_id)
        self._num_finished -= entry.state is GroupState.FINISHED

    def take(self, version: int) -> tuple[RolloutGroup, ...] | None:
        """Take the next batch, to be trained at ``version``: P groups, oldest first.

        Returns None if too few groups are finished, or if an unfinished group must not be overtaken
        again.

        Raises:
            StalenessError: a group, or one of its tokens, is too old.
        """
        chosen = self._next_batch()
        if chosen is None:
            return None
        self._check_age(chosen, version)
        for entry in chosen:
            self._move(entry, GroupState.BATCHED)
        return tuple(entry.group for entry in chosen if entry.group is not None)

    def overtaken_in_batch(self) -> frozenset[str]:
        """Return the ids of groups in the batch that were overtaken by younger groups."""
        return frozenset(
            entry.group_id
            for entry in self.entries
            if entry.state is GroupState.BATCHED and (entry.overtaken or entry.restarts)
        )

    def finish_batch(
        self, counts: TokenCounts, *, masked_by_loss: Mapping[str, int] | None = None
    ) -> tuple[str, ...]:
        """Remove the batch, which has been trained, and free its slots. The arguments are as for
        `TokenLedger.train`.

        Returns the ids of groups that are now too old to train on: at S = 0 every group left in the
        buffer, otherwise none. Call `restart` for each.

        Raises:
            LedgerError: the counts are not those of the batch. Nothing is changed.
        """
        batch = [one.group_id for one in self.entries if one.state is GroupState.BATCHED]
        self._ledger.train(batch, counts, masked_by_loss=masked_by_loss)
        younger = 0  # number of younger groups in the batch
        for entry in reversed(self.entries):
            if entry.state is GroupState.BATCHED:
                del self._entries[entry.group_id]
                younger += 1
            else:
                entry.overtaken += younger
        return tuple(self._entries) if self._capacity.staleness == 0 else ()

    def restart(self, group_id: str, *, version: int) -> Entry:
        """Begin a group again, as if it were admitted at ``version``. The group keeps its place in
        the order."""
        entry = self._entries[group_id]
        self._move(entry, GroupState.WAITING)
        entry.admitted_version, entry.group = version, None
        entry.restarts += 1
        return entry

    def restore(self, entries: Iterable[Entry]) -> None:
        """Load the groups of a checkpoint. They are waiting or finished, and already in the
        ledger."""
        for entry in entries:
            self._entries[entry.group_id] = entry
            self._num_finished += entry.state is GroupState.FINISHED

    def _in_state(self, group_id: str, state: GroupState) -> Entry:
        entry = self._entries[group_id]
        if entry.state is not state:
            raise ValueError(f"group {group_id} is {entry.state}, not {state}")
        return entry

    def _move(self, entry: Entry, state: GroupState) -> None:
        self._num_finished += (state is GroupState.FINISHED) - (entry.state is GroupState.FINISHED)
        entry.state = state

    def _next_batch(self) -> list[Entry] | None:
        if self._num_finished < self._capacity.groups_per_step or self._is_blocked():
            return None
        chosen: list[Entry] = []
        # A group that overtakes any unfinished group also overtakes the oldest one, so only the
        # oldest is checked.
        oldest: Entry | None = None
        overtaking = 0
        for entry in self._pending():
            if entry.state is not GroupState.FINISHED:
                oldest = oldest or entry
                continue
            if oldest is not None:
                overtaking += 1
                if oldest.overtaken + overtaking > self._max_overtaken(oldest):
                    self._blocking = oldest
                    return None
            chosen.append(entry)
            if len(chosen) == self._capacity.groups_per_step:
                return chosen
        return None

    def _is_blocked(self) -> bool:
        """Whether the group that blocked the last batch still does. Groups that finish or leave
        meanwhile change nothing: as many as before would have to overtake it, or more."""
        one = self._blocking
        if one is None or one.group is not None or self._entries.get(one.group_id) is not one:
            self._blocking = None
        return self._blocking is not None

    def _pending(self) -> Iterator[Entry]:
        return (e for e in self._entries.values() if e.state is not GroupState.BATCHED)

    def _max_overtaken(self, entry: Entry) -> float:
        if self._capacity.staleness > 0:
            return self._capacity.max_overtakers
        # A group that was restarted once is in the next batch; otherwise short answers would
        # always win.
        return 0 if entry.restarts else math.inf

    def _check_age(self, chosen: list[Entry], version: int) -> None:
        oldest_allowed = version - self._capacity.staleness
        for entry in chosen:
            rollouts = entry.group.rollouts if entry.group else ()
            turns = [turn for rollout in rollouts for turn in rollout.turns]
            runs = [run for turn in turns for run in turn.completion.version_runs]
            oldest = min([entry.admitted_version, *(run.version for run in runs)])
            if oldest < oldest_allowed:
                raise StalenessError(
                    f"group {entry.group_id}, admitted at version {entry.admitted_version}, has "
                    f"tokens of version {oldest} and would be trained at {version}; "
                    f"schedule.staleness is {self._capacity.staleness}"
                )
