"""A mixture gives each part its own problems, environments and rubric."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.fast.data.test_mixture import Numbers
from tests.support.rollouts import PROBLEM
from torchtitan_rl.environments.mixture import MixtureTask, join
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric, Score
from torchtitan_rl.rollout.task import Dataset, Split, Task
from torchtitan_rl.types import Problem, Rollout, RolloutStatus


@dataclass(frozen=True, kw_only=True)
class Part(Task):
    """Its environments are the problems that they were made for."""

    size: int = 2
    solved_at: float = 1.0
    part_reward: float | None = None  # without a rubric, if None
    is_ranked: bool = False

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        return Numbers(self.size)

    def environment(self, problem: Problem, *, tokenizer: Any, limits: Any) -> Any:
        return problem

    def rubric(self) -> Rubric | None:
        if self.part_reward is None:
            return None
        part_reward = self.part_reward
        ids = RewardFunction(name="ids", function=lambda rollout, problem: part_reward)
        return Ranked([ids]) if self.is_ranked else Rubric([ids])

    def success_reward(self) -> float:
        return self.solved_at

    def errors(self) -> list[str]:
        return [] if self.size else [f"task.size={self.size}: must be above 0"]


class Ranked(Rubric):
    async def score_group(self, rollouts: Any, problem: Problem) -> list[Score]:
        assert problem.problem_id == "0"
        return [Score(reward=float(place)) for place in range(len(rollouts))]


ROLLOUT = Rollout(
    rollout_id="r",
    group_id="g",
    problem_id="p",
    turns=(),
    status=RolloutStatus.COMPLETED,
    reward=0.25,
)


def mixture(**parts: Part) -> MixtureTask:
    return MixtureTask(tasks=dict(parts), weights={"a": 2.0})


def test_each_problem_goes_to_its_part_as_the_part_made_it() -> None:
    task = mixture(a=Part(), b=Part())
    source = task.dataset("train", seed=0)
    problems = [source.next() for _ in range(6)]
    assert sorted(problem.task for problem in problems) == ["a"] * 4 + ["b"] * 2
    for problem in problems:
        env = task.environment(problem, tokenizer=None, limits=RolloutConfig())
        assert env == Problem(problem_id=problem.problem_id[2:], data={})


def test_each_part_is_scored_by_its_own_rubric_or_environment() -> None:
    rubric = mixture(a=Part(part_reward=0.5), b=Part()).rubric()
    assert rubric is not None
    assert not rubric.scores_groups
    rewards = [
        asyncio.run(rubric.score(ROLLOUT, join(part, PROBLEM))).reward for part in ("a", "b")
    ]
    assert rewards == [0.5, 0.25]
    assert mixture(a=Part(), b=Part()).rubric() is None


def test_a_part_that_ranks_its_group_does_so_in_a_mixture() -> None:
    rubric = mixture(
        a=Part(part_reward=1.0, is_ranked=True), b=Part(), c=Part(part_reward=0.5)
    ).rubric()
    assert rubric is not None
    assert rubric.scores_groups
    problem = Problem(problem_id="0", data={})
    for part, rewards in (("a", [0.0, 1.0]), ("b", [0.25, 0.25]), ("c", [0.5, 0.5])):
        scores = asyncio.run(rubric.score_group([ROLLOUT, ROLLOUT], join(part, problem)))
        assert [score.reward for score in scores] == rewards


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (MixtureTask(tasks={}), "task.tasks is empty"),
        (mixture(**{"a": Part(), "b/c": Part()}), "task.tasks has 'b/c': give a name without /"),
        (mixture(a=Part(size=0)), "task.tasks.a.size=0: must be above 0"),
        (replace(mixture(b=Part())), "task.weights.a is 2.0: give a weight above 0, of a name"),
        (
            mixture(a=Part(), b=Part(solved_at=0.5)),
            "task.tasks: all parts must count as solved from the same reward (`solved_at`, or "
            "`success_reward`); it is a 1, b 0.5",
        ),
    ],
)
def test_what_is_wrong_names_the_part(task: MixtureTask, message: str) -> None:
    (error,) = task.errors()
    assert error.startswith(message)
