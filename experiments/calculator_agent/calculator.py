"""The agent's tool: exact arithmetic on untrusted text.

Only numbers, ``+ - * /``, signs and brackets are evaluated; no code is executed. Values are
fractions, so 10/3*3 is 10.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

_MAX_LENGTH = 64  # characters; bounds the size of every value and the depth of the tree
_ALLOWED = re.compile(r"[0-9.()+*/ -]+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculatorError(ValueError):
    """The expression has no value; the message says why."""


def calculate(expression: str) -> Fraction:
    """Compute the value of an arithmetic expression.

    Raises:
        CalculatorError: the expression is too long, is not arithmetic, or divides by zero.
    """
    if len(expression) > _MAX_LENGTH:
        raise CalculatorError("too long")
    if not _ALLOWED.fullmatch(expression):
        raise CalculatorError("only numbers, + - * / and brackets")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, expression)
    except SyntaxError:
        raise CalculatorError("not an expression") from None
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None


def as_text(value: Fraction) -> str:
    """Format a whole number, or a decimal with at most six digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr, expression: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            literal = ast.get_source_segment(expression.strip(), node)
            return Fraction(literal or "")  # the text, not its float: 0.1 is a tenth
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, expression)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left, expression), _value(right, expression))
    raise CalculatorError("only numbers, + - * / and brackets")
