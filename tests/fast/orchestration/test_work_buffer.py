"""The buffer between dataset and trainer: the bound, the order, the account."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import turns
from tests.support.rollouts import PROBLEM
from tests.support.turns import rollout, turn
from torchtitan_rl.orchestration.config import capacity_errors, derive_capacity
from torchtitan_rl.orchestration.ledger import TokenLedger, require_sums
from torchtitan_rl.orchestration.records import TokenCounts
from torchtitan_rl.orchestration.work_buffer import (
    GroupState,
    StalenessError,
    WorkBuffer,
)
from torchtitan_rl.types import RolloutGroup


def group(group_id: str, *, version: int = 0) -> RolloutGroup:
    one = turn((1,), (7,), versions=[version])
    return turns.group(rollout(one, rollout_id=f"{group_id}/r0"), group_id=group_id)


def buffer(*, groups_per_step: int, staleness: int, max_share: float = 0.0) -> WorkBuffer:
    capacity = derive_capacity(
        groups_per_step=groups_per_step,
        staleness=staleness,
        max_share=max_share,
    )
    return WorkBuffer(capacity, TokenLedger())


def train(work: WorkBuffer) -> tuple[str, ...]:
    """Finish the batch that was taken; nothing was entered for its groups."""
    return work.finish_batch(TokenCounts(generated=0, trained=0))


def fill(work: WorkBuffer, version: int = 0) -> list[str]:
    names = []
    while work.has_room:
        names.append(f"g{work._ledger.groups_admitted}")
        work.admit(names[-1], PROBLEM, version=version)
        work.start(names[-1])
    return names


def taken(work: WorkBuffer, version: int = 0) -> list[str] | None:
    batch = work.take(version)
    return None if batch is None else [member.group_id for member in batch]


@pytest.mark.parametrize(
    ("staleness", "max_share", "expected"),
    [(0, 0.0, 8), (1, 0.0, 16), (1, 0.5, 12), (2, 0.5, 20), (0, 0.5, 12), (4, 1.0, 32)],
)
def test_the_capacity_follows_from_staleness_and_window(
    staleness: int, max_share: float, expected: int
) -> None:
    capacity = derive_capacity(groups_per_step=8, staleness=staleness, max_share=max_share)
    assert capacity.buffer == expected
    if staleness:
        assert (capacity.buffer - 1 + capacity.max_overtakers) // 8 == staleness
        assert (capacity.buffer + capacity.max_overtakers) // 8 == staleness + 1  # not one more


@pytest.mark.parametrize(("staleness", "share"), [(1, 0.6), (0, 1.5), (4, float("nan"))])
def test_a_share_that_cannot_work_is_named(staleness: int, share: float) -> None:
    (error,) = capacity_errors(staleness=staleness, max_share=share)
    assert error.startswith("schedule.max_overtaking_share")


def test_a_batch_is_taken_in_order_of_admission_whatever_finished_first() -> None:
    work = buffer(groups_per_step=2, staleness=0)
    fill(work)
    work.finish(group("g1"))
    assert taken(work) is None
    work.finish(group("g0"))
    assert taken(work) == ["g0", "g1"]


def test_a_slow_group_is_overtaken_by_as_many_as_the_window_says_and_no_more() -> None:
    work = buffer(groups_per_step=2, staleness=2, max_share=1.0)  # two may overtake
    fill(work)
    work.finish(group("g1"))
    work.finish(group("g2"))
    assert taken(work) == ["g1", "g2"]
    assert train(work) == ()
    fill(work, version=1)
    for name in ("g3", "g4", "g5"):
        work.finish(group(name, version=1))
    assert taken(work, version=1) is None  # g0 was overtaken twice
    work.finish(group("g0"))
    assert taken(work, version=1) == ["g0", "g3"]


def test_while_a_slow_group_blocks_the_batch_the_others_are_not_looked_at_each_time() -> None:
    work = buffer(groups_per_step=64, staleness=2, max_share=0.5)
    slow, *others = fill(work)
    pending, looks = work._pending, 0

    def counted():
        nonlocal looks
        for entry in pending():
            looks += 1
            yield entry

    work._pending = counted  # type: ignore[method-assign]
    for name in others:
        work.finish(group(name))
        assert not work.has_batch
    assert looks <= 64
    work.finish(group(slow))
    assert taken(work) == [slow, *others[:63]]


def test_over_admission_at_staleness_0_restarts_the_late_ones_and_waits_for_them_next() -> None:
    work = buffer(groups_per_step=2, staleness=0, max_share=0.5)  # three start
    fill(work)
    work.finish(group("g1"))
    work.finish(group("g2"))
    assert taken(work) == ["g1", "g2"]
    late = train(work)
    assert late == ("g0",)
    work.restart("g0", version=1)
    work.start("g0")
    fill(work, version=1)
    work.finish(group("g3", version=1))
    work.finish(group("g4", version=1))
    assert taken(work, version=1) is None  # restarted once: it is in the next batch
    work.finish(group("g0", version=1))
    assert taken(work, version=1) == ["g0", "g3"]


def test_a_token_that_is_too_old_is_refused_at_consumption() -> None:
    work = buffer(groups_per_step=1, staleness=1)
    fill(work, version=3)
    work.finish(group("g0", version=1))
    with pytest.raises(StalenessError, match=r"g0.*version 1.*at 3"):
        work.take(3)


@given(
    groups_per_step=st.integers(1, 5),
    staleness=st.integers(0, 4),
    window_share=st.floats(0, 1),
    choices=st.lists(st.integers(0, 10**6), max_size=120),
)
def test_whatever_happens_the_bound_holds_the_counts_add_up_and_nothing_gets_stuck(
    groups_per_step: int, staleness: int, window_share: float, choices: list[int]
) -> None:
    work = buffer(
        groups_per_step=groups_per_step,
        staleness=staleness,
        max_share=window_share * (staleness / 2 if staleness else 1.0),
    )
    version = 0
    for choice in choices:
        fill(work, version)
        running = [entry for entry in work.entries if entry.state is GroupState.RUNNING]
        if choice % 7 == 0 and work.entries:
            work.discard(work.entries[choice % len(work.entries)].group_id, "chance")
        elif running:
            # Tokens of the oldest version that admission allows: the worst case.
            slow = running[choice % len(running)]
            work.finish(group(slow.group_id, version=slow.admitted_version))
        else:
            assert work.take(version) is not None, "all are finished and none can be taken"
            version += 1
            for name in train(work):
                work.restart(name, version=version)
                work.start(name)
        if choice % 3 and work.take(version) is not None:
            version += 1
            for name in train(work):
                work.restart(name, version=version)
                work.start(name)
        has_batch, blocking = work.has_batch, work._blocking
        work._blocking = None  # looks at all groups again
        assert work.has_batch is has_batch
        work._blocking = blocking
        held = work._ledger.state_dict()["tokens_of"].keys()
        assert held == {entry.group_id for entry in work.entries}
        require_sums(work._ledger.totals())
