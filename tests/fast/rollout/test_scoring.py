"""Rewards of rollouts: alone, together, failing."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.rollouts import (
    CountingEnv,
    Factory,
    ScriptedGenerate,
    only,
    raising,
    run_rollouts,
)
from tests.support.turns import rollout as made_rollout
from tests.support.turns import turn
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric, Score, with_score
from torchtitan_rl.types import RolloutStatus


def test_a_rollout_is_reported_as_soon_as_it_ends_not_when_its_group_does():
    """r1 may only go on after r0 has been reported."""
    first_reported = asyncio.Event()

    async def after_the_first():
        await first_reported.wait()
        return (11,)

    def entry(request):
        return after_the_first() if request.session_id == "g/r1" else (11,)

    reported = []

    def on_rollout(rollout):
        reported.append((rollout.rollout_id, rollout.reward))
        first_reported.set()

    rubric = Rubric([RewardFunction(name="length", function=lambda r, p: len(r.turns))])
    factory = Factory(CountingEnv)
    generate = ScriptedGenerate([entry, (13,)])
    run_rollouts(factory, generate=generate, size=2, rubric=rubric, on_rollout=on_rollout)
    assert reported == [("g/r0", 2.0), ("g/r1", 2.0)]


def test_a_rubric_that_scores_groups_sees_all_siblings_that_did_not_fail():
    class Ranks(Rubric):
        async def score_group(self, rollouts, problem):
            return [Score(reward=float(i), components={"rank": i}) for i in range(len(rollouts))]

    reported = []
    factory = Factory(CountingEnv, raising("step", ValueError("no")), CountingEnv)
    rollouts = run_rollouts(factory, size=3, rubric=Ranks([]), on_rollout=reported.append)
    assert [rollout.reward for rollout in rollouts] == [0.0, None, 1.0]
    assert rollouts[2].metrics["reward/rank"] == 1
    assert reported == list(rollouts)


@pytest.mark.parametrize("kind", ["raises", "too few", "hangs"])
def test_group_scoring_that_fails_is_a_reward_error_of_each_sibling(kind):
    class Broken(Rubric):
        async def score_group(self, rollouts, problem):
            if kind == "raises":
                raise KeyError("k")
            if kind == "hangs":
                await asyncio.Event().wait()
            return []

    rollouts = run_rollouts(Factory(CountingEnv), size=2, rubric=Broken([], timeout_s=0.02))
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.REWARD_ERROR}
    assert all("score_group" in rollout.cause for rollout in rollouts)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_without_a_rubric_an_environment_that_gives_no_finite_reward_is_a_reward_error(reward):
    rollout = only(Factory(lambda: CountingEnv(reward=reward)))
    assert (rollout.status, rollout.reward) == (RolloutStatus.REWARD_ERROR, None)
    assert rollout.cause


@pytest.mark.parametrize("field", ["reward", "branch_reward"])
def test_a_turn_whose_reward_is_not_finite_makes_its_rollout_a_reward_error(field):
    turns = turn([1], [2]), turn([1, 2], [3], **{field: float("nan")})
    scored = with_score(made_rollout(*turns), Score(reward=1.0))
    assert (scored.status, scored.reward) == (RolloutStatus.REWARD_ERROR, None)
    assert scored.cause == "the reward of turn 2 is nan"


def test_a_reward_whose_square_is_no_number_makes_its_rollout_a_reward_error():
    """A step's standard deviation and a group's advantages are computed from squares."""
    scored = with_score(made_rollout(turn([1], [2])), Score(reward=1e300))
    assert (scored.status, scored.cause) == (RolloutStatus.REWARD_ERROR, "the reward is 1e+300")


def test_failed_rollouts_are_not_scored():
    def never(rollout, problem):
        raise AssertionError("scored")

    rubric = Rubric([RewardFunction(name="never", function=never)])
    rollout = only(Factory(raising("step", ValueError("no"))), rubric=rubric)
    assert rollout.status is RolloutStatus.ENV_ERROR
