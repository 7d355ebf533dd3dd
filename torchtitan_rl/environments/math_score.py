"""Compares answers as mathematics, for `scoring.run_checker`."""

from __future__ import annotations

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit


def math_score(right: str, answer: str) -> float:
    """Return 1 if `math-verify` finds the answers equal (numbers, fractions, sets, expressions,
    LaTeX), otherwise 0. There is no limit on time or memory."""
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
