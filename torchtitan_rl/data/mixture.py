"""Several datasets as one, in exact proportions.

Invariants: after n problems each part has given its share of n, to within one problem for two parts
and a few for more, so that every batch has the mixture's proportions. Which part comes next depends
on the weights and the numbers given alone. Ids begin with the part's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchtitan_rl.rollout.task import AdaptiveDataset, Dataset, Outcome, adapts, metrics_of
from torchtitan_rl.types import Problem


class MixtureDataset:
    """The next problem comes from the part that is furthest below its share.

    It ends when one of its parts does.

    Raises:
        ValueError: there is no part, or a weight is not above 0.
    """

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
        """Each part gets its own."""
        for name, part in self._parts.items():
            if isinstance(part, AdaptiveDataset):
                own = [one for one in outcomes if part_of(one.problem) == name]
                part.record([replace(one, problem=split_off(one.problem)) for one in own])

    def metrics(self) -> Mapping[str, float]:
        """Those of the parts, each below the part's name."""
        return {
            f"{name}/{metric}": value
            for name, part in self._parts.items()
            for metric, value in metrics_of(part).items()
        }

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
    """A part's problem as one of the mixture."""
    task = f"{part}/{problem.task}" if problem.task else part
    return replace(problem, problem_id=f"{part}/{problem.problem_id}", task=task)


def part_of(problem: Problem) -> str:
    """Which part of the mixture a problem comes from."""
    return problem.task.partition("/")[0]


def split_off(problem: Problem) -> Problem:
    """What `join` was given: the problem as its part knows it."""
    part, _, task = problem.task.partition("/")
    return replace(problem, problem_id=problem.problem_id.removeprefix(f"{part}/"), task=task)
