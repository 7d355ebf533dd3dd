"""Compares answers as mathematics, for `scoring.run_checker`. `run_checker` imports this module,
and with it `math-verify`, before the time limit of a comparison begins to count."""

from __future__ import annotations

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit


def math_score(right: str, answer: str) -> float:
    """Return 1 if `math-verify` finds that the two answers are equal, otherwise 0. `math-verify`
    compares numbers, fractions, sets, expressions and LaTeX.

    The comparison has no limit on time or memory. A tower of powers, for example, needs much of
    both.
    """
    expected = parse(_as_math(right), parsing_timeout=None)
    given = parse(_as_math(answer), parsing_timeout=None)
    return float(bool(verify(expected, given, timeout_seconds=None)))


def _as_math(text: str) -> str:
    r"""Mark the text as LaTeX: `math-verify` reads LaTeX only between dollars or in \boxed."""
    return text if "$" in text or r"\boxed" in text or "\\" not in text else f"${text}$"


# Warm up the parser, which takes 50 ms for the first expression of each kind. Each comparison runs
# in a process forked from this one, so no comparison has to wait for this.
for _text in (r"\frac{1}{2}", r"2\sqrt{3} + x^2", r"\{1, 2\}", "(1, 2]", r"x = \dfrac{1}{2}\pi"):
    math_score(f"${_text}$", f"${_text}$")
