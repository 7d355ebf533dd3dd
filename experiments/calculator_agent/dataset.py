"""Procedural word problems with one or two operations, made of stories.

Invariants: those of `experiments.procedural`. The expression that solves a problem decides its
split, so no problem is in both splits. Answers are whole numbers above 0.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_rl import Problem, Split
from torchtitan_rl.experiments.calculator_agent.calculator import CalculatorError, calculate
from torchtitan_rl.experiments.procedural import split_of

_MAX_FACTOR = 12  # largest second factor of a product, and largest divisor


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSizes:
    """``two_operations``: share of problems with two operations. ``max_number``: largest number in
    a problem's text."""

    two_operations: float
    max_number: int


def make_problem(split: Split, index: int, sizes: ProblemSizes) -> Problem:
    """Make problem ``index`` of ``split``; ``data`` has ``text``, ``expression`` and ``answer``."""
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
    """Draw a value for each letter; factors and divisors are small."""
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


NAMES: tuple[str, ...] = (
    "Adam", "Alice", "Boris", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Irene",
    "Jonas", "Kim", "Laura", "Milan", "Nina", "Oscar", "Paula", "Ruth", "Simon", "Vera",
)  # fmt: skip

THINGS: tuple[str, ...] = (
    "apples", "balls", "books", "cards", "coins", "cookies", "flowers", "marbles",
    "pears", "pencils", "shells", "stamps", "stickers", "stones", "tickets", "toys",
)  # fmt: skip


class Story(NamedTuple):
    """A problem with open fields: ``name`` and ``other`` are people, ``things`` are counted, and
    ``a``, ``b``, ``c`` are numbers. ``expression`` solves the problem."""

    text: str
    expression: str


ONE_OPERATION: tuple[Story, ...] = (
    Story("{name} has {a} {things}. {other} brings {b} more. How many are there now?", "{a}+{b}"),
    Story("{name} and {other} find {a} and {b} {things}. How many is that together?", "{a}+{b}"),
    Story("{name} has {a} {things} and gives {b} to {other}. How many are left?", "{a}-{b}"),
    Story("{name} loses {b} of {a} {things}. How many are left?", "{a}-{b}"),
    Story("{name} buys {a} boxes with {b} {things} each. How many is that together?", "{a}*{b}"),
    Story("{a} friends have {b} {things} each. How many is that together?", "{a}*{b}"),
    Story("{name} shares {a} {things} among {b} friends. How many does each get?", "{a}/{b}"),
    Story("{name} packs {a} {things} into {b} boxes. How many are in each?", "{a}/{b}"),
)

TWO_OPERATIONS: tuple[Story, ...] = (
    Story(
        "{name} has {a} {things}, finds {b} more and gives {c} to {other}. How many are left?",
        "{a}+{b}-{c}",
    ),
    Story(
        "{name} has {a} {things} and buys {b} boxes with {c} each. How many are there now?",
        "{a}+{b}*{c}",
    ),
    Story(
        "{name} buys {a} boxes with {b} {things} each and loses {c}. How many are left?",
        "{a}*{b}-{c}",
    ),
    Story(
        "Each day {name} finds {a} {things} and {other} finds {b}. How many after {c} days?",
        "({a}+{b})*{c}",
    ),
    Story(
        "{name} and {other} share {a} and {b} {things} among {c} friends. How many does each get?",
        "({a}+{b})/{c}",
    ),
    Story(
        "{name} has {a} {things}, loses {b} and packs the others into {c} boxes. "
        "How many are in each?",
        "({a}-{b})/{c}",
    ),
)
