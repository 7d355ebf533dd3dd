"""What a resumed run may use of the rollouts that were recorded."""

from __future__ import annotations

from tests.support.turns import turn
from torchtitan_rl.orchestration.checkpointing import RecordedGroups
from torchtitan_rl.orchestration.work_buffer import Entry
from torchtitan_rl.rollout.records import RecordedRollout
from torchtitan_rl.types import Problem, Turn

PROBLEM = Problem(problem_id="a/7", data={"seed": 3})


def of_version(version: int) -> Turn:
    return turn((1, 2), (3, 4), versions=[version])


def recorded(group_id: str, *, version: int) -> dict[str, RecordedRollout]:
    name = f"{group_id}/r0"
    return {name: RecordedRollout(rollout_id=name, turns=(of_version(version),))}


def admitted(group_id: str, version: int) -> Entry:
    return Entry(group_id=group_id, problem=PROBLEM, admitted_version=version)


def test_a_restored_group_continues_with_its_turns_once() -> None:
    groups = RecordedGroups(recorded("g", version=3), [admitted("g", 3)], restored_version=5)
    assert len(groups.of_group("g")) == 1
    usable, rolled_back = groups.pop("g", admitted_version=3)
    assert [len(one.turns) for one in usable.values()] == [1]
    assert rolled_back == 0
    assert groups.pop("g", admitted_version=3) == ({}, 0)


def test_turns_of_a_version_that_the_restored_trainer_has_not_reached_are_rolled_back() -> None:
    groups = RecordedGroups(recorded("g", version=6), [admitted("g", 5)], restored_version=5)
    usable, rolled_back = groups.pop("g", admitted_version=5)
    assert [one.turns for one in usable.values()] == [()]
    assert rolled_back == 2


def test_a_group_from_after_the_checkpoint_is_used_only_at_the_restored_version() -> None:
    later = RecordedGroups(recorded("g", version=5), restored_version=5)
    assert later.pop("g", admitted_version=6) == ({}, 2)
    again = RecordedGroups(recorded("g", version=5), restored_version=5)
    usable, rolled_back = again.pop("g", admitted_version=5)
    assert len(usable) == 1
    assert rolled_back == 0
