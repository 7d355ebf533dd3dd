"""Several tasks in one run, each with its weight, its environments and its rubric.

Invariants of `MixtureDataset`: after n problems, the number of problems from each part differs from
the part's share of n by at most one if there are two parts, and by at most a few if there are more.
The next part depends only on the weights and on how many problems each part has given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.rubric import Rubric, Score, environment_score
from torchtitan_rl.rollout.task import (
    AdaptiveDataset,
    Dataset,
    Outcome,
    Split,
    Task,
    adapts,
    metrics_of,
)
from torchtitan_rl.types import Problem, Rollout

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig

_SAME = 1e-6  # `success_reward`s that differ by less are equal; some tasks allow for rounding


@dataclass(frozen=True, kw_only=True)
class MixtureTask(Task):
    """Tasks by name; each step, and the validation set, has them in proportion to their weights::

        MixtureTask(
            tasks={"words": Gsm8kTask(), "sums": ReasoningGymTask(tasks={"chain_sum": 1.0})},
            weights={"words": 3.0},
        )

    Rewards are reported for each part (``train/of_task/words/reward_mean``). Options of a part are
    given like ``--task.tasks.words.compare number``.
    """

    tasks: dict[str, Task]
    """The parts by name; names are without ``/``."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each part, 1 where it is not given."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        parts = {name: task.dataset(split, seed=seed) for name, task in self.tasks.items()}
        return MixtureDataset(parts, {name: self.weights.get(name, 1.0) for name in parts})

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        part = self.tasks[part_of(problem)]
        return part.environment(split_off(problem), tokenizer=tokenizer, limits=limits)

    def rubric(self) -> Rubric | None:
        rubrics = {name: task.rubric() for name, task in self.tasks.items()}
        if not any(rubrics.values()):
            return None
        if any(rubric is not None and rubric.scores_groups for rubric in rubrics.values()):
            return _GroupRubrics(rubrics)
        return _Rubrics(rubrics)

    def success_reward(self) -> float:
        return min(task.success_reward() for task in self.tasks.values())

    def resume_identity(self) -> Mapping[str, Any]:
        return {"weights": {name: one for name, one in self.weights.items() if one != 1.0}}

    def with_all_options(self) -> Task:
        tasks = {name: task.with_all_options() for name, task in self.tasks.items()}
        return replace(self, tasks=tasks, weights=dict.fromkeys(tasks, 1.0) | self.weights)

    def errors(self) -> list[str]:
        found = [] if self.tasks else ["task.tasks is empty: give a task with a name"]
        for name, task in self.tasks.items():
            if "/" in name or not name:
                found.append(f"task.tasks has {name!r}: give a name without /")
            found += [error.replace("task", f"task.tasks.{name}", 1) for error in task.errors()]
            if hasattr(task, "agent"):
                found.append(f"task.tasks.{name}: agents cannot be part of a mixture")
        found += [
            f"task.weights.{name} is {weight}: give a weight above 0, of a name in task.tasks"
            for name, weight in self.weights.items()
            if name not in self.tasks or not 0 < weight < math.inf
        ]
        solved_at = {name: task.success_reward() for name, task in self.tasks.items()}
        if solved_at and max(solved_at.values()) - min(solved_at.values()) > _SAME:
            given = ", ".join(f"{name} {reward:g}" for name, reward in solved_at.items())
            found.append(
                "task.tasks: all parts must count as solved from the same reward (`solved_at`, or "
                f"`success_reward`); it is {given}"
            )
        return found


class _Rubrics(Rubric):
    """Scores a rollout by the rubric of its part, or by its environment."""

    def __init__(self, rubrics: Mapping[str, Rubric | None]) -> None:
        timeouts = [rubric.timeout_s for rubric in rubrics.values() if rubric is not None]
        super().__init__((), timeout_s=max(timeouts))
        self._rubrics = rubrics

    async def score(self, rollout: Rollout, problem: Problem) -> Score:
        rubric = self._rubrics[part_of(problem)]
        if rubric is None:
            return environment_score(rollout)
        return await rubric.score(rollout, split_off(problem))


class _GroupRubrics(_Rubrics):
    """The rubrics of a mixture with a part that scores whole groups."""

    async def score_group(self, rollouts: Sequence[Rollout], problem: Problem) -> Sequence[Score]:
        rubric = self._rubrics[part_of(problem)]
        if rubric is None:
            return [environment_score(rollout) for rollout in rollouts]
        return await rubric.score_group(rollouts, split_off(problem))


class MixtureDataset:
    """Problems of several datasets: the next comes from the part that is furthest below its share.
    Ends when a part ends. Raises ValueError: there is no part, or a weight is not above 0."""

    def __init__(self, parts: Mapping[str, Dataset], weights: Mapping[str, float]) -> None:
        if not parts or not all(weights[name] > 0 for name in parts):
            raise ValueError(f"a mixture needs parts with weights above 0, got {dict(weights)}")
        total = sum(weights[name] for name in parts)
        self._parts = dict(parts)
        self._shares = {name: weights[name] / total for name in parts}
        self._given = dict.fromkeys(parts, 0)
        self._last = next(iter(parts))

    @property
    def epoch(self) -> int:
        return self._parts[self._last].epoch

    def next(self) -> Problem:
        number = sum(self._given.values()) + 1
        name = max(self._parts, key=lambda one: self._shares[one] * number - self._given[one])
        problem = self._parts[name].next()
        self._given[name] += 1
        self._last = name
        return join(name, problem)

    @property
    def adapts(self) -> bool:
        return any(map(adapts, self._parts.values()))

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Give each part the outcomes of its own problems."""
        for name, part in self._parts.items():
            if isinstance(part, AdaptiveDataset):
                own = [one for one in outcomes if part_of(one.problem) == name]
                part.record([replace(one, problem=split_off(one.problem)) for one in own])

    def metrics(self) -> Mapping[str, float]:
        metrics = {name: metrics_of(part).items() for name, part in self._parts.items()}
        return {f"{name}/{key}": one for name, own in metrics.items() for key, one in own}

    def state_dict(self) -> dict[str, Any]:
        return {
            "given": self._given,
            "last": self._last,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given = {name: int(state["given"][name]) for name in self._parts}
        self._last = state["last"]
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])


def join(part: str, problem: Problem) -> Problem:
    """Convert a part's problem to a problem of the mixture."""
    task = f"{part}/{problem.task}" if problem.task else part
    return replace(problem, problem_id=f"{part}/{problem.problem_id}", task=task)


def part_of(problem: Problem) -> str:
    """The name of the part of the mixture that a problem comes from."""
    return problem.task.partition("/")[0]


def split_off(problem: Problem) -> Problem:
    """Undo `join`: return the part's own problem."""
    part, _, task = problem.task.partition("/")
    return replace(problem, problem_id=problem.problem_id.removeprefix(f"{part}/"), task=task)
