"""What a finished rollout is worth: a weighted sum of named reward functions.

A function that raises, takes too long or returns no finite number makes the score an error with
its cause; scoring itself never raises, so that one rollout cannot fail its siblings.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchtitan_rl.deadlines import deadline
from torchtitan_rl.rollout.calls import call, is_cancelled, summary
from torchtitan_rl.types import Problem, Rollout, RolloutStatus

RewardCallable = Callable[[Rollout, Problem], float | Awaitable[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One component. The rollout's ``reward`` holds what the environment gave, or None.

    A plain function runs on the event loop unless it is ``blocking`` (it computes for long, or
    waits); then it gets a thread. ``weight`` 0 makes it a metric only.
    """

    name: str
    function: RewardCallable
    weight: float = 1.0
    blocking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """``reward`` None: it could not be computed, for the ``cause``."""

    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    cause: str | None = None


class Rubric:
    """Scores each rollout as soon as it ends.

    A subclass that overrides `score_group` scores whole groups instead (rankings, diversity):
    it is called once with the siblings that did not fail, after the last one has ended.
    """

    def __init__(self, functions: Sequence[RewardFunction], *, timeout_s: float = 60.0) -> None:
        names = [function.name for function in functions]
        if len(set(names)) != len(names):
            raise ValueError(f"reward functions need different names, got {names}")
        self._functions = tuple(functions)
        self.timeout_s = timeout_s  # for each function, and for a whole `score_group`

    @property
    def scores_groups(self) -> bool:
        return type(self).score_group is not Rubric.score_group

    async def score(self, rollout: Rollout, problem: Problem) -> Score:
        """Run all functions at once and add up ``weight * value``."""
        results = await asyncio.gather(
            *(self._evaluate(function, rollout, problem) for function in self._functions)
        )
        components, causes, total = {}, [], 0.0
        for function, result in zip(self._functions, results, strict=True):
            if isinstance(result, str):
                causes.append(f"reward {function.name}: {result}")
            else:
                components[function.name] = result
                total += function.weight * result
        if not causes and not math.isfinite(total):
            causes.append(f"the weighted sum is {total}")
        if causes:
            return Score(reward=None, components=components, cause="; ".join(causes))
        return Score(reward=total, components=components)

    async def score_group(self, rollouts: Sequence[Rollout], problem: Problem) -> Sequence[Score]:
        """One score for each rollout, in their order. To be overridden."""
        return await asyncio.gather(*(self.score(rollout, problem) for rollout in rollouts))

    async def _evaluate(
        self, function: RewardFunction, rollout: Rollout, problem: Problem
    ) -> float | str:
        """The function's value, or what went wrong."""
        try:
            async with deadline(self.timeout_s) as limit:
                if function.blocking:
                    value = await call(function.function, rollout, problem)
                else:
                    result = function.function(rollout, problem)
                    value = await result if isinstance(result, Awaitable) else result
            value = float(value)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return summary(error)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return f"no value after {self.timeout_s} s"
            return summary(error)
        return value if math.isfinite(value) else f"returned {value}"


async def score_whole_group(
    rubric: Rubric, rollouts: Sequence[Rollout], problem: Problem
) -> list[Rollout]:
    """Score siblings together; an override that fails makes each a REWARD_ERROR."""
    scorable = [rollout for rollout in rollouts if not rollout.status.is_failure]
    scores: Sequence[Score]
    try:
        async with deadline(rubric.timeout_s):
            scores = await rubric.score_group(scorable, problem)
        if len(scores) != len(scorable):
            raise ValueError(f"{len(scores)} scores for {len(scorable)} rollouts")
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        failed = Score(reward=None, cause=f"score_group: {summary(error)}")
        scores = [failed] * len(scorable)
    by_id = {rollout.rollout_id: s for rollout, s in zip(scorable, scores, strict=True)}
    return [
        with_score(rollout, by_id[rollout.rollout_id]) if rollout.rollout_id in by_id else rollout
        for rollout in rollouts
    ]


def environment_score(rollout: Rollout) -> Score:
    """The score where there is no rubric: what the environment said."""
    if rollout.reward is None:
        return Score(reward=None, cause="neither the environment nor a rubric gave a reward")
    return Score(reward=rollout.reward)


def with_score(rollout: Rollout, score: Score) -> Rollout:
    """The scored rollout; components become metrics ``reward/<name>``."""
    components = {f"reward/{name}": value for name, value in score.components.items()}
    metrics = {**rollout.metrics, **components}
    if score.reward is not None and math.isfinite(score.reward):
        return replace(rollout, reward=score.reward, metrics=metrics)
    cause = score.cause or f"the reward is {score.reward}"
    return replace(
        rollout, status=RolloutStatus.REWARD_ERROR, reward=None, cause=cause, metrics=metrics
    )
