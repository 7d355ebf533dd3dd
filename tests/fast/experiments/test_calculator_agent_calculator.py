from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.experiments.calculator_agent.calculator import (
    CalculatorError,
    as_text,
    calculate,
)

NUMBERS = st.integers(0, 999)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        (" 7 - -2 ", 9),
        ("10/3*3", 10),
        ("0.1+0.2", Fraction(3, 10)),
        ("8/5", Fraction(8, 5)),
        ("12345678901234567891+0", 12345678901234567891),
    ],
)
def test_arithmetic_is_exact_and_follows_the_usual_order(
    expression: str, value: int | Fraction
) -> None:
    assert calculate(expression) == value


@given(NUMBERS, NUMBERS, NUMBERS)
def test_it_agrees_with_python(a: int, b: int, c: int) -> None:
    assert calculate(f"({a}+{b})*{c}-{a}") == (a + b) * c - a


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "2+",
        "1/0",
        "1/(2-2)",
        "2**9",
        "7//2",
        "()",
        "5(3)",
        "1.2.3",
        "012",
        "4\n+4",
        "x+1",
        "True",
        "1j",
        "1e9",
        "(1,)",
        "__import__('os').getcwd()",
        "9*" * 40 + "9",
        "(" * 32 + "1" + ")" * 31,
    ],
)
def test_what_is_not_arithmetic_is_refused_with_a_reason(expression: str) -> None:
    with pytest.raises(CalculatorError, match=r"\w"):
        calculate(expression)


@given(st.text(max_size=80) | st.text("0123456789.()+*/ -", max_size=80))
def test_any_text_has_a_value_or_is_refused(text: str) -> None:
    with contextlib.suppress(CalculatorError):
        assert isinstance(calculate(text), Fraction)


@pytest.mark.parametrize(
    ("value", "text"),
    [(Fraction(14), "14"), (Fraction(-3), "-3"), (Fraction(1, 3), "0.333333")],
)
def test_whole_values_are_written_without_a_point(value: Fraction, text: str) -> None:
    assert as_text(value) == text
