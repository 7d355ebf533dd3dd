"""Rubrics: weighted sums of reward functions, and what happens when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading

import pytest

from tests.support.rollouts import PROBLEM
from torchtitan_rl.rollout.abandoned import abandoned
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


def test_components_become_metrics_next_to_the_environments():
    scored = with_score(ROLLOUT, score(constant("a", 2.0)))
    assert (scored.reward, scored.status) == (2.0, RolloutStatus.MAX_TURNS)
    assert scored.metrics == {"steps": 2.0, "reward/a": 2.0}


def test_a_function_may_return_a_score_with_components_or_why_there_is_none():
    def gives(reward, cause=None):
        given = Score(reward=reward, components={"tokens": 7.0}, cause=cause)
        return RewardFunction(name="judge", function=lambda rollout, problem: given)

    assert score(gives(0.5)) == Score(reward=0.5, components={"judge": 0.5, "judge/tokens": 7.0})
    failed = score(gives(None, "it is busy"))
    assert failed.cause == "reward judge: it is busy"
    assert failed.components == {"judge/tokens": 7.0}
    assert score(gives(math.inf)).cause == "reward judge: returned inf"


def test_blocking_functions_run_in_threads_of_their_own():
    """They meet at a barrier, which one thread could never pass."""
    barrier = threading.Barrier(3)

    def meet(rollout, problem):
        barrier.wait(timeout=60)
        return 1.0

    functions = [RewardFunction(name=f"{i}", function=meet, blocking=True) for i in range(3)]
    assert score(*functions).reward == 3.0


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
        (lambda rollout, problem: -math.inf, "returned -inf"),
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


def test_a_function_that_hangs_is_a_reward_error():
    async def hangs(rollout, problem):
        await asyncio.Event().wait()

    result = score(RewardFunction(name="judge", function=hangs), timeout_s=0.01)
    assert result.reward is None
    assert result.cause == "reward judge: no value after 0.01 s"


def test_a_function_that_ignores_its_time_out_is_left_to_run_on_and_counted_by_name():
    async def scenario():
        release = asyncio.Event()

        async def deaf(rollout, problem):
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()

        rubric = Rubric([RewardFunction(name="judge", function=deaf)], timeout_s=0.01)
        result = await rubric.score(ROLLOUT, PROBLEM)
        assert "reward judge: 1" in abandoned.names()
        release.set()
        while abandoned.num_running:
            await asyncio.sleep(0.001)
        return result

    assert "no value after 0.01 s" in asyncio.run(scenario()).cause


def test_a_sum_that_overflows_is_a_reward_error():
    assert score(constant("a", 1e308), constant("b", 1e308)).reward is None


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(ValueError, match="different names"):
        Rubric([constant("a", 1.0), constant("a", 2.0)])


def test_only_a_rubric_that_overrides_score_group_scores_groups():
    class Grouped(Rubric):
        async def score_group(self, rollouts, problem):
            return []

    assert Grouped([]).scores_groups
    assert not Rubric([]).scores_groups
