from __future__ import annotations

import re

from torchtitan_rl.experiments.calculator_agent.calculator import calculate
from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes, make_problem
from torchtitan_rl.types import Problem

SIZES = ProblemSizes(two_operations=0.5, max_number=99)


def problems(sizes: ProblemSizes = SIZES) -> list[Problem]:
    return [make_problem("train", index, sizes) for index in range(400)]


def test_the_answer_is_the_value_of_the_expression_whole_and_above_zero() -> None:
    for problem in problems():
        answer = problem.data["answer"]
        assert isinstance(answer, int)
        assert calculate(problem.data["expression"]) == answer > 0


def test_the_text_has_every_number_of_the_expression_once_and_no_other() -> None:
    for problem in problems():
        told = re.findall(r"\d+", problem.data["text"])
        assert sorted(told) == sorted(re.findall(r"\d+", problem.data["expression"]))
        assert all(2 <= int(number) <= SIZES.max_number for number in told)
        assert "{" not in problem.data["text"]


def test_the_share_of_two_operations_is_that_of_the_sizes() -> None:
    def shares(two_operations: float) -> float:
        sizes = ProblemSizes(two_operations=two_operations, max_number=20)
        signs = [re.findall(r"[-+*/]", p.data["expression"]) for p in problems(sizes)]
        assert {len(found) for found in signs} <= {1, 2}
        return sum(len(found) == 2 for found in signs) / len(signs)

    assert shares(0.0) == 0.0
    assert shares(1.0) == 1.0
    assert 0.4 < shares(0.5) < 0.6
