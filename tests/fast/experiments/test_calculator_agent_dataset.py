from __future__ import annotations

import json
import re

import pytest

from torchtitan_rl.experiments.calculator_agent.calculator import calculate
from torchtitan_rl.experiments.calculator_agent.dataset import (
    ProblemSizes,
    WordProblems,
    make_problem,
)
from torchtitan_rl.rollout.task import Split
from torchtitan_rl.types import Problem

SIZES = ProblemSizes(two_operations=0.5, max_number=99)


def dataset(split: Split = "train", *, seed: int = 0) -> WordProblems:
    return WordProblems(split, seed=seed, sizes=SIZES, num_problems=20)


def take(source: WordProblems, count: int) -> list[Problem]:
    return [source.next() for _ in range(count)]


def problems(split: Split, sizes: ProblemSizes = SIZES, count: int = 400) -> list[Problem]:
    return [make_problem(split, index, sizes) for index in range(count)]


def test_the_answer_is_the_value_of_the_expression_whole_and_above_zero() -> None:
    for problem in problems("train"):
        answer = problem.data["answer"]
        assert isinstance(answer, int)
        assert calculate(problem.data["expression"]) == answer > 0


def test_the_text_has_every_number_of_the_expression_once_and_no_other() -> None:
    for problem in problems("train"):
        told = re.findall(r"\d+", problem.data["text"])
        assert sorted(told) == sorted(re.findall(r"\d+", problem.data["expression"]))
        assert all(2 <= int(number) <= SIZES.max_number for number in told)
        assert "{" not in problem.data["text"]


def test_the_share_of_two_operations_is_that_of_the_sizes() -> None:
    def shares(two_operations: float) -> float:
        sizes = ProblemSizes(two_operations=two_operations, max_number=20)
        signs = [re.findall(r"[-+*/]", p.data["expression"]) for p in problems("train", sizes)]
        assert {len(found) for found in signs} <= {1, 2}
        return sum(len(found) == 2 for found in signs) / len(signs)

    assert shares(0.0) == 0.0
    assert shares(1.0) == 1.0
    assert 0.4 < shares(0.5) < 0.6


def test_no_expression_of_one_split_is_in_the_other() -> None:
    # Few possible expressions, so that an accidental overlap would be certain.
    small = ProblemSizes(two_operations=0.0, max_number=9)
    train, validation = (
        {problem.data["expression"] for problem in problems(split, small)}
        for split in ("train", "validation")
    )
    assert train
    assert validation
    assert not train & validation


def test_a_problem_id_means_the_same_problem_whatever_the_seed() -> None:
    first = {problem.problem_id: problem for problem in take(dataset(seed=1), 20)}
    second = {problem.problem_id: problem for problem in take(dataset(seed=2), 20)}
    assert first == second
    assert list(first) != list(second)


def test_validation_problems_are_the_same_in_every_run_and_epoch() -> None:
    one, other = dataset("validation", seed=1), dataset("validation", seed=2)
    assert take(one, 20) == take(other, 20) == take(one, 20)


@pytest.mark.parametrize("taken", [0, 7, 20, 33])
def test_a_dataset_that_is_resumed_continues_with_the_same_problems(taken: int) -> None:
    source = dataset(seed=5)
    take(source, taken)
    resumed = dataset(seed=6)  # the saved run's seed holds
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.epoch == source.epoch
    assert take(resumed, 50) == take(source, 50)
