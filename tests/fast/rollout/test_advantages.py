"""Advantages, against numbers computed by hand: kinds, unequal lengths, discounts, branches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.turns import rollout, turn
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.episodes import STD_EPS, has_signal, turn_advantages
from torchtitan_rl.types import Rollout, RolloutStatus, Turn

CREDIT = RolloutConfig(credit="turn")
KINDS = ["mean", "std", "leave_one_out"]
REWARDS = st.lists(st.none() | st.floats(-100, 100), max_size=12)


def conversation(reward: float | None, *turn_rewards: float | None, index: int = 0) -> Rollout:
    """Turns of one token each, that extend one another."""
    tokens = [1]
    turns = []
    for number, earned in enumerate(turn_rewards):
        turns.append(turn(tokens, [10 + number], reward=earned))
        tokens = [*tokens, 10 + number, 0]
    status = RolloutStatus.ENV_ERROR if reward is None else RolloutStatus.COMPLETED
    return rollout(*turns, reward=reward, status=status, rollout_id=f"g/r{index}")


def asked(
    prompt: list[int], sampled: list[int], reward: float | None = None, **fields: object
) -> Turn:
    """A turn that an agent asked for."""
    return turn(prompt, sampled, request_key="1.x", branch_reward=reward, **fields)


def advantages(rewards: list[float | None], kind: str) -> list[float | None]:
    siblings = [conversation(reward, None) for reward in rewards]
    found = turn_advantages(siblings, RolloutConfig(advantage=kind))
    return [None if one is None else one[0] for one in found]


def test_each_kind_by_hand():
    assert advantages([1.0, 0.0, None, 0.0, 3.0], "mean") == [0.0, -1.0, None, -1.0, 2.0]
    assert advantages([1.0, 0.0, 5.0], "leave_one_out") == [-1.5, -3.0, 4.5]
    assert advantages([2.0, 0.0, None, 5.0, 0.0, 5.0], "pair") == [0.0, -1.0, None, 1.0, 0.0, 0.0]
    assert advantages([2.0, None, 2.0], "pair") == [0.0, None, 0.0]
    assert advantages([2.0], "pair") == [0.0]
    low, high = advantages([2.0, 6.0], "std")
    assert (low, high) == pytest.approx((-2 / (2 + STD_EPS), 2 / (2 + STD_EPS)), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [5.0], [None, 5.0], [None, None], []])
def test_a_group_without_variance_is_exactly_zero(kind: str, rewards: list[float | None]):
    assert advantages(rewards, kind) == [None if reward is None else 0.0 for reward in rewards]


@given(REWARDS, st.sampled_from(KINDS))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards, kind):
    values = advantages(rewards, kind)
    assert [value is None for value in values] == [reward is None for reward in rewards]
    pairs = sorted(
        (reward, value)
        for reward, value in zip(rewards, values, strict=True)
        if reward is not None and value is not None
    )
    assert math.fsum(value for _, value in pairs) == pytest.approx(0.0, abs=1e-6)
    assert [value for _, value in pairs] == sorted(value for _, value in pairs)


def test_returns_are_discounted_and_compared_turn_by_turn_also_with_a_sibling_that_ended_before():
    """Returns 1.75, 1.5, 3; the sibling's only one is 4, and stays 4."""
    siblings = [conversation(1.0, 1.0, 0.0, 2.0), conversation(4.0, None)]
    config = replace(CREDIT, turn_discount=0.5)
    assert turn_advantages(siblings, config) == [[-1.125, -1.25, -0.5], [1.125]]
    alone = turn_advantages(siblings, replace(config, advantage="leave_one_out"))
    assert alone == [[-2.25, -2.5, -1.0], [2.25]]
    scaled, _ = turn_advantages(siblings, replace(config, advantage="std"))
    expected = [-half / (half + STD_EPS) for half in (1.125, 1.25, 0.5)]
    assert scaled == pytest.approx(expected, rel=1e-12)


def test_a_failed_sibling_is_in_no_baseline_and_one_without_turns_counts_with_its_reward():
    failed, unasked = conversation(None, 5.0), conversation(3.0)
    siblings = [conversation(0.0, 1.0, 0.0), failed, unasked]
    assert turn_advantages(siblings, CREDIT) == [[-1.0, -1.5], None, []]


def test_a_turn_of_several_branches_has_the_mean_of_what_follows_it():
    """The first turn's branches earn 4 and 0 (its own reward stands for the rollout's in the second
    one); a sub-agent has a conversation of its own, which ends with the rollout's reward 1."""
    shared = asked([1], [2])
    tree = rollout(
        asked([1, 2, 0], [5], 4.0), shared, asked([1, 2, 3], [6], 0.0), asked([9], [9]), reward=1.0
    )
    sibling = rollout(asked([1], [2]), reward=1.0)
    found = turn_advantages([tree, sibling], CREDIT)
    # Turn 1: returns 2 and 1, mean 1.5; turn 2: 4, 0 and the ended 1, mean 5 / 3; the sibling's 1.
    assert found[0] == pytest.approx([4 - 4 / 3, 2 - 1.25, 0 - 4 / 3, 1 - 1.25])
    assert found[1] == pytest.approx([1 - 1.25])


def test_a_turn_that_its_agent_never_saw_has_no_advantage_and_its_reward_counts_nowhere():
    unseen = rollout(asked([1], [2]), asked([1, 2, 0], [3], 7.0, is_seen=False), reward=1.0)
    found = turn_advantages([unseen, rollout(asked([1], [2]), reward=0.0)], CREDIT)
    assert found == [[0.5, 0.0], [-0.5]]


def trees() -> st.SearchStrategy[Rollout]:
    """Each turn continues one of those before it, or begins a conversation."""

    def grow(parents: list[int], reward: float) -> Rollout:
        tokens: list[list[int]] = []
        turns = []
        for number, parent in enumerate(parents):
            before = tokens[parent % (number + 1)] if parent % (number + 1) < number else []
            prompt = [*before, 100 + number]
            turns.append(asked(prompt, [number]))
            tokens.append([*prompt, number])
        return rollout(*turns, reward=reward)

    return st.builds(grow, st.lists(st.integers(0, 20), max_size=6), st.floats(-5, 5))


def chains() -> st.SearchStrategy[Rollout]:
    return st.builds(
        lambda reward, length: conversation(reward, *[None] * length),
        st.none() | st.floats(-5, 5),
        st.integers(0, 5),
    )


@given(st.lists(trees() | chains(), max_size=5), st.sampled_from(KINDS))
def test_with_a_final_reward_alone_credit_by_turn_equals_that_by_outcome_bit_for_bit(
    siblings: list[Rollout], kind: str
):
    by_turn = replace(CREDIT, advantage=kind)
    by_outcome = RolloutConfig(advantage=kind)
    assert turn_advantages(siblings, by_turn) == turn_advantages(siblings, by_outcome)


@given(
    st.lists(
        st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=4), min_size=2, max_size=5
    )
)
def test_leave_one_out_compares_with_the_other_siblings_alone(rewards: list[list[float]]):
    """By its definition, with returns added up one by one."""
    siblings = [conversation(0.0, *of_one) for of_one in rewards]
    found = turn_advantages(siblings, replace(CREDIT, advantage="leave_one_out"))
    for index, own in enumerate(rewards):
        others = rewards[:index] + rewards[index + 1 :]
        for number in range(len(own)):
            returns = [sum(one[min(number, len(one) - 1) :]) for one in others]
            expected = sum(own[number:]) - sum(returns) / len(returns)
            assert found[index] is not None
            assert found[index][number] == pytest.approx(expected)


def test_a_group_has_signal_where_what_is_trained_on_differs():
    siblings = [conversation(1.0, 1.0, 0.0), conversation(1.0, 0.0, 0.0)]
    assert not has_signal(siblings, RolloutConfig())
    assert has_signal(siblings, CREDIT)
    assert not has_signal([siblings[0], siblings[0]], CREDIT)


@pytest.fixture
def function(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(
        "def best(values, rollouts):\n"
        "    assert len(values) == len(rollouts)\n"
        "    return [value - max(values) for value in values]\n"
        "def wrong(values, rollouts):\n"
        "    return [float('nan')] * len(values)\n"
    )
    return f"{path}:best"


def test_a_function_of_ones_own_compares_rewards_or_the_returns_of_each_turn(function: str):
    siblings = [conversation(0.0, 1.0, 0.0), conversation(2.0, 0.0, 0.0), conversation(None, 9.0)]
    by_outcome = turn_advantages(siblings, RolloutConfig(advantage=function))
    assert by_outcome == [[-2.0, -2.0], [0.0, 0.0], None]
    by_turn = turn_advantages(siblings, replace(CREDIT, advantage=function))
    assert by_turn == [[-1.0, -2.0], [0.0, 0.0], None]


def test_a_function_that_returns_no_numbers_ends_the_run_by_name(function: str):
    config = RolloutConfig(advantage=function.replace("best", "wrong"))
    with pytest.raises(TorchtitanRLError, match=r"rollout\.advantage .*wrong.* 2 finite numbers"):
        turn_advantages([conversation(1.0, 0.0), conversation(0.0, 0.0)], config)
