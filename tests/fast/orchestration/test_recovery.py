"""Untrained groups through a checkpoint, and what a resumed run may use of their rollouts."""

from __future__ import annotations

from tests.support.turns import group, rollout, turn
from torchtitan_rl.orchestration.recovery import RecordedGroups
from torchtitan_rl.orchestration.saved_run import groups_from_bytes, groups_to_bytes
from torchtitan_rl.orchestration.work_buffer import Entry, GroupState
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.types import Problem, Turn

PROBLEM = Problem(problem_id="a/7", data={"seed": 3})


def of_version(version: int) -> Turn:
    return turn((1, 2), (3, 4), versions=[version])


def recorded(group_id: str, *, version: int) -> dict[str, RecordedRollout]:
    name = f"{group_id}/r0"
    return {name: RecordedRollout(rollout_id=name, turns=(of_version(version),))}


def admitted(group_id: str, version: int) -> Entry:
    return Entry(group_id=group_id, problem=PROBLEM, admitted_version=version)


def test_groups_come_back_from_a_checkpoint_finished_ones_whole_and_others_waiting() -> None:
    whole = rollout(of_version(4), rollout_id="e0/a/7/r0", reward=0.1 + 0.2)
    ended = group(whole, group_id="e0/a/7", problem=PROBLEM)
    finished = Entry(
        group_id="e0/a/7",
        problem=PROBLEM,
        admitted_version=4,
        state=GroupState.FINISHED,
        overtaken=1,
        group=ended,
    )
    running = Entry(
        group_id="e1/a/7",
        problem=PROBLEM,
        admitted_version=5,
        state=GroupState.RUNNING,
        resamples=1,
    )
    rollouts = recorded("e1/a/7", version=5)
    saved = groups_from_bytes(
        groups_to_bytes([finished, running], {"e1/a/7": tuple(rollouts.values())})
    )
    running.state = GroupState.WAITING
    assert saved.entries == (finished, running)
    assert saved.rollouts == rollouts


def test_a_restored_group_goes_on_with_its_turns_once() -> None:
    groups = RecordedGroups(recorded("g", version=3), [admitted("g", 3)], restored_version=5)
    assert len(groups.of_group("g")) == 1
    usable, rolled_back = groups.take("g", admitted_version=3)
    assert [len(one.turns) for one in usable.values()] == [1]
    assert rolled_back == 0
    assert groups.take("g", admitted_version=3) == ({}, 0)


def test_turns_of_a_version_that_the_restored_trainer_has_not_reached_are_rolled_back() -> None:
    groups = RecordedGroups(recorded("g", version=6), [admitted("g", 5)], restored_version=5)
    usable, rolled_back = groups.take("g", admitted_version=5)
    assert [one.turns for one in usable.values()] == [()]
    assert rolled_back == 2


def test_a_group_from_after_the_checkpoint_is_used_only_at_the_restored_version() -> None:
    later = RecordedGroups(recorded("g", version=5), restored_version=5)
    assert later.take("g", admitted_version=6) == ({}, 2)
    again = RecordedGroups(recorded("g", version=5), restored_version=5)
    usable, rolled_back = again.take("g", admitted_version=5)
    assert len(usable) == 1
    assert rolled_back == 0
