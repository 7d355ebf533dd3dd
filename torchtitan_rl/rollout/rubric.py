"""Computes rewards of finished rollouts as weighted sums of named reward functions.

If a function raises an error, takes too long or does not return a finite number, the rollout's
score has a cause instead of a reward. Scoring itself never raises, so one rollout cannot fail its
siblings.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchtitan_rl.rollout.calls import CallFailedError, CallTimeoutError, in_thread, within
from torchtitan_rl.types import Problem, Rollout, RolloutStatus

_MAX_REWARD = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of a rollout. If no reward could be computed, ``reward`` is None and ``cause`` is
    set."""

    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    cause: str | None = None


RewardCallable = Callable[[Rollout, Problem], float | Score | Awaitable[float | Score]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One component of a reward; also logged as the metric ``reward/<name>``.

    The function, which may be async, is called with the finished rollout (whose ``reward`` is the
    environment's or None) and its problem. A synchronous function runs on the event loop, or in a
    thread if it is ``blocking`` (it waits, or computes for long). With ``weight`` 0 the value is
    only a metric. The components of a `Score` are logged as ``reward/<name>/<component>``.
    """

    name: str
    function: RewardCallable
    weight: float = 1.0
    blocking: bool = False


class Rubric:
    """Scores each rollout as soon as it ends; ``timeout_s`` limits each function.

    A subclass that overrides `score_group` scores whole groups instead (rankings, diversity): it
    is called once, after the last sibling has ended, and ``timeout_s`` limits this call.

    >>> def is_short(rollout: Rollout, problem: Problem) -> float:
    ...     return float(rollout.num_sampled_tokens <= problem.data["budget"])
    >>> rubric = Rubric([
    ...     RewardFunction(name="environment", function=lambda rollout, problem: rollout.reward),
    ...     RewardFunction(name="short", function=is_short, weight=0.1),
    ... ])
    """

    def __init__(self, functions: Sequence[RewardFunction], *, timeout_s: float = 60.0) -> None:
        names = [function.name for function in functions]
        if len(set(names)) != len(names):
            raise ValueError(f"reward functions need different names, got {names}")
        self._functions = tuple(functions)
        self.timeout_s = timeout_s

    @property
    def scores_groups(self) -> bool:
        return type(self).score_group is not Rubric.score_group

    async def score(self, rollout: Rollout, problem: Problem) -> Score:
        """Run all functions concurrently and add up ``weight * value``."""
        results = await asyncio.gather(
            *(self._evaluate(function, rollout, problem) for function in self._functions)
        )
        components: dict[str, float] = {}
        causes, total = [], 0.0
        for function, result in zip(self._functions, results, strict=True):
            name = function.name
            components |= {f"{name}/{part}": value for part, value in result.components.items()}
            if result.reward is None:
                causes.append(f"reward {name}: {result.cause}")
            else:
                components[name] = result.reward
                total += function.weight * result.reward
        if not causes and not math.isfinite(total):
            causes.append(f"the weighted sum is {total}")
        if causes:
            return Score(reward=None, components=components, cause="; ".join(causes))
        return Score(reward=total, components=components)

    async def score_group(self, rollouts: Sequence[Rollout], problem: Problem) -> Sequence[Score]:
        """Return one score for each rollout that did not fail, in their order."""
        return await asyncio.gather(*(self.score(rollout, problem) for rollout in rollouts))

    async def _evaluate(
        self, function: RewardFunction, rollout: Rollout, problem: Problem
    ) -> Score:
        try:
            name = f"reward {function.name}"
            score = await within(self.timeout_s, _score, function, rollout, problem, name=name)
        except CallTimeoutError:
            return Score(reward=None, cause=f"no value after {self.timeout_s} s")
        except CallFailedError as error:
            return Score(reward=None, cause=str(error))
        if score.reward is None or math.isfinite(score.reward):
            return score
        return replace(score, reward=None, cause=f"returned {score.reward}")


async def _score(function: RewardFunction, rollout: Rollout, problem: Problem) -> Score:
    if function.blocking:
        result = await in_thread(function.function, rollout, problem)
    else:
        result = function.function(rollout, problem)
    value = await result if isinstance(result, Awaitable) else result
    return value if isinstance(value, Score) else Score(reward=float(value))


async def score_whole_group(
    rubric: Rubric, rollouts: Sequence[Rollout], problem: Problem
) -> list[Rollout]:
    """Score siblings together. If `Rubric.score_group` fails, each sibling gets the status
    REWARD_ERROR."""
    scorable = [rollout for rollout in rollouts if not rollout.status.is_failure]

    async def scores_of_all() -> Sequence[Score]:
        scores = await rubric.score_group(scorable, problem)
        if len(scores) != len(scorable):
            raise ValueError(f"{len(scores)} scores for {len(scorable)} rollouts")
        return scores

    try:
        name = f"{type(rubric).__qualname__}.score_group"
        scores = await within(rubric.timeout_s, scores_of_all, name=name)
    except (CallTimeoutError, CallFailedError) as error:
        scores = [Score(reward=None, cause=f"score_group: {error}")] * len(scorable)
    remaining = iter(scores)
    return [
        rollout if rollout.status.is_failure else with_score(rollout, next(remaining))
        for rollout in rollouts
    ]


def environment_score(rollout: Rollout) -> Score:
    """Return the score of a rollout without a rubric: the environment's reward."""
    if rollout.reward is None:
        return Score(reward=None, cause="neither the environment nor a rubric gave a reward")
    return Score(reward=rollout.reward)


def with_score(rollout: Rollout, score: Score) -> Rollout:
    """Return the rollout with its score; components become metrics ``reward/<name>``."""
    components = {f"reward/{name}": value for name, value in score.components.items()}
    metrics = {**rollout.metrics, **components}
    cause = score.cause or f"the reward is {score.reward}"
    if score.reward is not None and _can_be_trained_on(score.reward):
        cause = _wrong_turn(rollout)
        if not cause:
            return replace(rollout, reward=score.reward, metrics=metrics)
    return replace(
        rollout, status=RolloutStatus.REWARD_ERROR, reward=None, cause=cause, metrics=metrics
    )


def _can_be_trained_on(reward: float) -> bool:
    """Whether squared differences of such rewards are finite, and advantages in float32."""
    return abs(reward) <= _MAX_REWARD


def _wrong_turn(rollout: Rollout) -> str:
    """Return the error of a turn whose reward cannot be trained on, or nothing."""
    for number, turn in enumerate(rollout.turns, start=1):
        for reward in (turn.reward, turn.branch_reward):
            if reward is not None and not _can_be_trained_on(reward):
                return f"the reward of turn {number} is {reward}"
    return ""
