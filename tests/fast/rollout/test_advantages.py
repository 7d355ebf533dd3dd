"""Advantages of groups, against the formulas and against each other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.rollout.advantages import STD_EPS, group_advantages

KINDS = ["mean", "std", "leave_one_out"]
REWARDS = st.lists(st.none() | st.floats(-100, 100), max_size=12)


def test_each_kind_by_hand():
    assert group_advantages([1.0, 0.0, 0.0, 3.0], "mean").values == (0.0, -1.0, -1.0, 2.0)
    assert group_advantages([1.0, 0.0, 5.0], "leave_one_out").values == (-1.5, -3.0, 4.5)
    low, high = group_advantages([2.0, 6.0], "std").values
    assert (low, high) == pytest.approx((-2 / (2 + STD_EPS), 2 / (2 + STD_EPS)), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_rollouts_have_no_advantage_and_count_in_no_baseline(kind):
    with_failures = group_advantages([None, 1.0, None, 0.0, 4.0], kind)
    without = group_advantages([1.0, 0.0, 4.0], kind)
    assert with_failures.values == (None, *without.values[:1], None, *without.values[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [5.0], [None, 5.0], [None, None], []])
def test_a_group_without_variance_says_so_and_is_exactly_zero(kind, rewards):
    result = group_advantages(rewards, kind)
    assert not result.has_variance
    assert result.values == tuple(None if reward is None else 0.0 for reward in rewards)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_that_is_not_finite_is_refused(kind):
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, math.nan], kind)


@given(REWARDS, st.sampled_from(KINDS))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards, kind):
    values = group_advantages(rewards, kind).values
    assert [value is None for value in values] == [reward is None for reward in rewards]
    pairs = sorted(
        (reward, value)
        for reward, value in zip(rewards, values, strict=True)
        if reward is not None and value is not None
    )
    assert math.fsum(value for _, value in pairs) == pytest.approx(0.0, abs=1e-6)
    assert all(math.isfinite(value) for _, value in pairs)
    assert [value for _, value in pairs] == sorted(value for _, value in pairs)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_leave_one_out_equals_its_definition(rewards):
    result = group_advantages(rewards, "leave_one_out")
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        expected = reward - math.fsum(others) / len(others)
        assert result.values[i] == pytest.approx(expected, abs=1e-9)
