"""Procedural word problems with one operation or two.

Invariants: those of `experiments.procedural`. The expression that solves a problem decides its
split, so none of one split is in the other. Answers are whole and above 0.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from torchtitan_rl import Problem, Split
from torchtitan_rl.experiments.calculator_agent.calculator import CalculatorError, calculate
from torchtitan_rl.experiments.calculator_agent.stories import (
    NAMES,
    ONE_OPERATION,
    THINGS,
    TWO_OPERATIONS,
)
from torchtitan_rl.experiments.procedural import split_of

_MAX_FACTOR = 12  # of one side of every product and quotient


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSizes:
    """``two_operations`` is the share of problems with two; no number is above ``max_number``."""

    two_operations: float
    max_number: int


def make_problem(split: Split, index: int, sizes: ProblemSizes) -> Problem:
    """Problem ``index`` of ``split``; ``data`` has its ``text``, ``expression`` and ``answer``."""
    rng = random.Random(f"calculator_agent/{split}/{index}")
    is_long = rng.random() < sizes.two_operations
    story = rng.choice(TWO_OPERATIONS if is_long else ONE_OPERATION)
    name, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    while True:
        numbers = _numbers(story.expression, sizes.max_number, rng)
        expression = story.expression.format(**numbers)
        answer = _whole_answer(expression)
        if answer is not None and split_of(expression) == split:
            break
    text = story.text.format(name=name, other=other, things=things, **numbers)
    return Problem(
        problem_id=f"calculator_agent/{split}/{index}",
        data={"text": text, "expression": expression, "answer": answer},
    )


def _numbers(expression: str, max_number: int, rng: random.Random) -> dict[str, int]:
    """A value for each letter; factors and divisors are small."""
    numbers = {letter: rng.randint(2, max_number) for letter in "abc"}
    for sign in "*/":
        _, found, rest = expression.partition(sign)
        if found:
            numbers[rest[1]] = rng.randint(2, min(_MAX_FACTOR, max_number))
    return numbers


def _whole_answer(expression: str) -> int | None:
    try:
        value = calculate(expression)
    except CalculatorError:
        return None
    return value.numerator if value.denominator == 1 and value > 0 else None
