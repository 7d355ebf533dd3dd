"""Procedural questions about numbers, which take a computer to answer.

Invariants: those of `experiments.procedural`. The expression that answers a question decides its
split, so none of one split is in the other.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from torchtitan_rl import Problem, Split
from torchtitan_rl.experiments.procedural import split_of


class Kind(NamedTuple):
    """``a`` is below ``b``; ``c`` is from 2 to 9."""

    question: str
    expression: str


KINDS: tuple[Kind, ...] = (
    Kind(
        "How many numbers from {a} to {b} are divisible by {c}?",
        "sum(n%{c}==0 for n in range({a},{b}+1))",
    ),
    Kind(
        "What is the sum of the numbers from {a} to {b} that are divisible by {c}?",
        "sum(n for n in range({a},{b}+1) if n%{c}==0)",
    ),
    Kind(
        "How many prime numbers are there from {a} to {b}?",
        "sum(all(n%d for d in range(2,n)) for n in range({a},{b}+1))",
    ),
    Kind(
        "What is the sum of the digits of {a} to the power of {c}?",
        "sum(int(d) for d in str({a}**{c}))",
    ),
    Kind("What is the largest digit of {a} times {b}?", "max(str({a}*{b}))"),
    Kind("What is the remainder of {a} to the power of {b} by {c}?", "{a}**{b}%{c}"),
)


def make_problem(split: Split, index: int, max_number: int) -> Problem:
    """Problem ``index`` of ``split``; ``data`` has its ``question``, ``expression``, ``answer``."""
    rng = random.Random(f"code_interpreter/{split}/{index}")
    kind = rng.choice(KINDS)
    while True:
        a, b = sorted(rng.sample(range(10, max_number + 1), 2))
        numbers = {"a": a, "b": b, "c": rng.randint(2, 9)}
        expression = kind.expression.format(**numbers)
        if split_of(expression) == split:
            break
    return Problem(
        problem_id=f"code_interpreter/{split}/{index}",
        data={
            "question": kind.question.format(**numbers),
            "expression": expression,
            "answer": str(eval(expression)),  # made above, of numbers
        },
    )
