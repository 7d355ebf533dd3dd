"""Scores of reasoning-gym, for `scoring.run_checker`. `run_checker` imports this module, and with
it the library, before the time limit of a score begins to count.

Some of the library's scorers evaluate the answer as Python. In the sandbox such code cannot reach
the machine, but it could set its own score. So this module lets these scorers accept only literals
and formulas, not arbitrary Python.
"""

from __future__ import annotations

import ast
import functools
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy
from reasoning_gym.algorithmic import binary_matrix, spiral_matrix, string_insertion
from reasoning_gym.games import countdown, n_queens, puzzle24
from sympy.parsing.sympy_parser import parse_expr

from torchtitan_rl.environments.gym_datasets import (
    MadeFrom,
    gym_dataset,
    gym_entry,
    question_digest,
)

_FORMULA = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
    *(ast.Constant, ast.Name, ast.Call, ast.expr_context),
)
_FUNCTIONS = {"abs", *sympy.functions.__all__}
_ARITHMETIC = re.compile(r"[\s0-9()+*/-]*")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def gym_scorer(made: MadeFrom, index: int, digest: str) -> Callable[[str], float]:
    """Make the function that scores answers to a problem: the sandbox's zygote calls this, and each
    answer is scored in a fork of it. Raises ValueError: this process makes a problem with another
    `question_digest` than ``digest``."""
    dataset, entry = gym_dataset(made), _entry(json.dumps(made), index)
    if question_digest(entry["question"]) != digest:
        raise ValueError(f"{made['name']} makes problem {index} differently in each process")
    return lambda answer: float(dataset.score_answer(answer, entry))


@functools.lru_cache(maxsize=256)  # problems of running groups; some take a second to make
def _entry(made: str, index: int) -> Any:
    return gym_entry(json.loads(made), index)


def _parse_formula(text: str, **options: Any) -> Any:
    """Call `parse_expr`, but only for numbers, names and mathematical functions; raises ValueError
    or SyntaxError for anything else."""
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        is_known = isinstance(node, _FORMULA)
        if isinstance(node, ast.Constant):
            is_known = isinstance(node.value, int | float)
        elif isinstance(node, ast.Call):
            is_known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        elif isinstance(node, ast.Name):
            is_known = not node.id.startswith("_")
        if not is_known:
            raise ValueError(f"{type(node).__name__} in a formula")
    return parse_expr(text, **options)


def _parse_arithmetic(text: str) -> Fraction:
    """Evaluate an expression of whole numbers with ``+ - * /``. With other syntax an answer could
    use numbers that the puzzle does not give: ``floor(pi)``, ``0x10``, ``1.5``. Raises ValueError,
    SyntaxError, KeyError or ZeroDivisionError: the text is not such an expression."""
    if not _ARITHMETIC.fullmatch(text):
        raise ValueError("not arithmetic")
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: Any) -> Fraction:
    if isinstance(node, ast.BinOp):
        return Fraction(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp):
        return Fraction(_OPERATORS[type(node.op)](_value(node.operand)))
    return Fraction(ast.literal_eval(node))


for _module in (binary_matrix, n_queens, spiral_matrix, string_insertion):
    vars(_module)["eval"] = ast.literal_eval
for _module in (countdown, puzzle24):
    vars(_module)["parse_expr"] = _parse_arithmetic
vars(sympy)["parse_expr"] = _parse_formula  # the tasks of algebra call it as `sympy.parse_expr`
