"""Mixtures, levels and resting problems: proportions, what they learn, and their states."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.data.curriculum import (
    CurriculumConfig,
    LevelDataset,
    RestConfig,
    RestingDataset,
)
from torchtitan_rl.environments.mixture import MixtureDataset, part_of
from torchtitan_rl.rollout.task import Outcome
from torchtitan_rl.types import Problem


class Numbers:
    """The problems 0 to ``size - 1``, again and again; remembers what it is told."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.position = 0
        self.told: list[str] = []

    @property
    def epoch(self) -> int:
        return max(0, self.position - 1) // self.size

    def next(self) -> Problem:
        self.position += 1
        return Problem(problem_id=str((self.position - 1) % self.size), data={})

    def record(self, outcomes: list[Outcome]) -> None:
        self.told += [f"{one.problem.task}|{one.problem.problem_id}" for one in outcomes]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def copied(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


def outcome(problem: Problem, solved: float | None) -> Outcome:
    return Outcome(problem=problem, solved=solved)


@given(weights=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), count=st.integers(1, 200))
def test_each_part_has_its_share_after_any_number_of_problems(
    weights: list[float], count: int
) -> None:
    by_name = {str(index): weight for index, weight in enumerate(weights)}
    mixture = MixtureDataset({name: Numbers() for name in by_name}, by_name)
    counts = Counter(part_of(mixture.next()) for _ in range(count))
    for name, weight in by_name.items():
        assert abs(counts[name] - count * weight / sum(weights)) < max(1, len(weights) - 1) + 1e-6


def test_a_mixture_continues_exactly_and_names_its_parts() -> None:
    def make() -> MixtureDataset:
        inner = MixtureDataset({"c": Numbers(3), "d": Numbers(3)}, {"c": 1.0, "d": 1.0})
        return MixtureDataset({"a": Numbers(2), "b": inner}, {"a": 1.0, "b": 2.0})

    mixture, resumed = make(), make()
    taken = [mixture.next() for _ in range(7)]
    assert {problem.task for problem in taken} == {"a", "b/c", "b/d"}
    assert all(problem.problem_id.startswith(problem.task) for problem in taken)
    resumed.load_state_dict(copied(mixture.state_dict()))
    assert resumed.epoch == mixture.epoch
    assert [resumed.next() for _ in range(20)] == [mixture.next() for _ in range(20)]


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0}])
def test_a_mixture_without_weights_is_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights above 0"):
        MixtureDataset({name: Numbers() for name in weights}, weights)


CURRICULUM = CurriculumConfig(enabled=True, window=3, raise_at=0.7, lower_at=0.1, max_level=2)


def play(levels: LevelDataset, *solved: float | None) -> int:
    """The level after these outcomes, each of a problem that was just given."""
    for share in solved:
        levels.record([outcome(levels.next(), share)])
    return levels.level


@pytest.mark.parametrize(
    ("solved", "level"),
    [
        ((1.0, 1.0), 0),  # fewer than the window
        ((1.0, 0.2, 1.0), 1),
        ((1.0, 1.0, 0.0), 0),
        ((0.0, 1.0, 1.0, 1.0), 1),  # the newest three
        ((1.0, None, 1.0, 1.0), 1),  # failed groups do not count
        ((1.0,) * 6, 2),
        ((1.0,) * 30, 2),  # the highest
        ((1.0,) * 3 + (0.0,) * 3, 0),
        ((0.0,) * 9, 0),
    ],
)
def test_the_level_rises_and_falls_with_success(
    solved: tuple[float | None, ...], level: int
) -> None:
    assert play(LevelDataset(lambda level: Numbers(), CURRICULUM, max_level=9), *solved) == level


@pytest.mark.parametrize("taken", range(0, 12, 3))
def test_levels_continue_exactly(taken: int) -> None:
    def make() -> LevelDataset:
        return LevelDataset(lambda level: Numbers(level + 2), CURRICULUM, max_level=9)

    levels, resumed = make(), make()
    play(levels, *[1.0] * taken)
    resumed.load_state_dict(copied(levels.state_dict()))
    assert resumed.epoch == levels.epoch
    assert play(resumed, 1.0, 1.0, 0.5) == play(levels, 1.0, 1.0, 0.5)
    assert [resumed.next() for _ in range(5)] == [levels.next() for _ in range(5)]


def epochs_of(rest: RestConfig, solved: dict[str, float], epochs: int = 6) -> list[str]:
    """Which of problems 0 to 3 are given in each epoch, with these shares of success; resumed from
    its state after each problem."""
    given = [""] * epochs
    resting = RestingDataset(Numbers(4), rest)
    while True:
        problem = resting.next()
        if resting.epoch >= epochs:
            return given
        given[resting.epoch] += problem.problem_id
        resting.record([outcome(problem, solved.get(problem.problem_id, 0.5))])
        state = copied(resting.state_dict())
        resting = RestingDataset(Numbers(4), rest)
        resting.load_state_dict(state)


@pytest.mark.parametrize(
    ("rest", "given"),
    [
        (RestConfig(epochs=1), ["0123", "03", "0123", "03", "0123", "03"]),
        (RestConfig(epochs=2), ["0123", "03", "03", "0123", "03", "03"]),
        (RestConfig(epochs=1, easy_at=0.4), ["0123"] * 6),  # all rest
    ],
)
def test_a_problem_that_is_always_or_never_solved_rests(rest: RestConfig, given: list[str]) -> None:
    assert epochs_of(rest, {"1": 1.0, "2": 0.0}) == given
