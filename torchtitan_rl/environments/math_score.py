"""Answers compared as mathematics. Imports `math-verify` with the module, so that the time limit of
`checkers.run_checker` is that of the comparison alone."""

from __future__ import annotations

from math_verify import parse, verify


def math_score(right: str, answer: str) -> float:
    """1 if `math-verify` finds the two equal: numbers, fractions, sets, expressions, LaTeX.

    It may take any time and memory, for example for towers of powers.
    """
    expected = parse(_as_math(right), parsing_timeout=None)
    given = parse(_as_math(answer), parsing_timeout=None)
    return float(bool(verify(expected, given, timeout_seconds=None)))


def _as_math(text: str) -> str:
    r"""`math-verify` reads LaTeX only between dollars or in \boxed."""
    return text if "$" in text or r"\boxed" in text or "\\" not in text else f"${text}$"
