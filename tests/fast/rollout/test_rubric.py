"""Rubrics: weighted sums of reward functions, and what happens when one fails."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.support.rollouts import (
    PROBLEM,
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
from torchtitan_rl.types import Rollout, RolloutStatus

ROLLOUT = Rollout(
    rollout_id="g/r0",
    group_id="g",
    problem_id="p",
    turns=(),
    status=RolloutStatus.MAX_TURNS,
    reward=0.25,
    metrics={"steps": 2.0},
)


def score(*functions: RewardFunction, timeout_s: float = 60.0):
    return asyncio.run(Rubric(functions, timeout_s=timeout_s).score(ROLLOUT, PROBLEM))


def constant(name: str, value: float, weight: float = 1.0) -> RewardFunction:
    return RewardFunction(name=name, function=lambda rollout, problem: value, weight=weight)


async def async_half(rollout, problem):
    await asyncio.sleep(0)
    return 0.5


def test_the_reward_is_the_weighted_sum_of_plain_and_async_functions():
    result = score(
        constant("a", 2.0, weight=3.0),
        RewardFunction(name="b", function=async_half),
        constant("only a metric", 7.0, weight=0.0),
        RewardFunction(name="environment", function=lambda rollout, problem: rollout.reward),
    )
    assert result.reward == 6.75
    assert result.components == {"a": 2.0, "b": 0.5, "only a metric": 7.0, "environment": 0.25}


def test_a_function_may_return_a_score_with_components_or_why_there_is_none():
    def gives(reward, cause=None):
        given = Score(reward=reward, components={"tokens": 7.0}, cause=cause)
        return RewardFunction(name="judge", function=lambda rollout, problem: given)

    assert score(gives(0.5)) == Score(reward=0.5, components={"judge": 0.5, "judge/tokens": 7.0})
    failed = score(gives(None, "it is busy"))
    assert failed.cause == "reward judge: it is busy"
    assert failed.components == {"judge/tokens": 7.0}
    assert score(gives(math.inf)).cause == "reward judge: returned inf"


def raises(rollout, problem):
    raise KeyError("answer")


def exits(rollout, problem):
    raise SystemExit(3)


async def cancels_itself(rollout, problem):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (raises, "KeyError: 'answer' (test_rubric.py:"),
        (exits, "SystemExit: 3 (test_rubric.py:"),
        (cancels_itself, "CancelledError"),
        (lambda rollout, problem: math.nan, "returned nan"),
        (lambda rollout, problem: None, "TypeError"),
    ],
)
@pytest.mark.parametrize("blocking", [False, True])
def test_a_function_without_a_finite_value_is_a_reward_error_with_its_cause(
    function, cause, blocking
):
    broken = RewardFunction(name="broken", function=function, blocking=blocking)
    scored = with_score(ROLLOUT, score(constant("a", 2.0), broken))
    assert (scored.status, scored.reward) == (RolloutStatus.REWARD_ERROR, None)
    assert scored.cause.startswith("reward broken: ")
    assert cause in scored.cause
    assert scored.metrics["reward/a"] == 2.0  # what could be computed is kept


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
