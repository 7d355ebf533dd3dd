"""How right an answer is: exactly, as a number, or as mathematics.

`extract` takes the answer out of what the policy wrote; `score_text` compares it at once, and
`MATH_SCORE`, which may compute for long, is run by `checkers.run_checker`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

import regex

from torchtitan_rl.environments.checkers import CheckTimeoutError
from torchtitan_rl.rollout.calls import in_thread

Comparison = Literal["exact", "number", "math"]

MATH_SCORE = "torchtitan_rl.environments.math_score:math_score"
_MAX_DIGITS = 4000
_SEARCH_S = 2.0  # of CPU time
# A hyphen after a digit or a bracket subtracts, or is of a range.
_NUMBER = re.compile(r"((?:(?<![\d)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+))(?:[eE]([+-]?\d+))?")


async def extract(pattern: str, text: str) -> str | None:
    """`last_match` in what a policy wrote: in a thread that does not keep the interpreter's lock.

    Raises:
        CheckTimeoutError: the search took more than `_SEARCH_S`.
    """
    try:
        found: str | None = await in_thread(last_match, pattern, text, _SEARCH_S)
    except TimeoutError:
        raise CheckTimeoutError(f"{pattern!r:.100}: no end after {_SEARCH_S} s") from None
    return found


def last_match(pattern: str, text: str, timeout_s: float | None = None) -> str | None:
    """The last match of ``pattern`` (its first group, if it has one); None where there is none.
    An empty pattern takes the whole text.

    >>> last_match(r"#### (.+)", "3 + 4 is 7, so\\n#### 7")
    '7'

    Raises:
        TimeoutError: the search took more than ``timeout_s`` of CPU time.
    """
    if not pattern:
        return text.strip()
    found = None
    for match in regex.finditer(pattern, text, concurrent=True, timeout=timeout_s):
        found = match
    if found is None:
        return None
    return str(found.group(1 if found.re.groups else 0) or "").strip()


def pattern_errors(field: str, pattern: str) -> list[str]:
    """Of a task's field; a message if it is not a regular expression."""
    try:
        regex.compile(pattern)
    except regex.error as error:
        return [f"task.{field}={pattern!r}: not a regular expression ({error})"]
    return []


def score_text(comparison: Literal["exact", "number"], right: str, answer: str) -> float:
    """1 if the answer is right, else 0.

    ``exact`` compares texts; ``number`` the last number of each, with thousands separators and
    exponents:

    >>> score_text("number", "1,200", "They earn 1200.00 dollars.")
    1.0
    """
    if comparison == "exact":
        return float(right.strip() == answer.strip())
    expected = last_number(right)
    return float(expected is not None and last_number(answer) == expected)


def last_number(text: str) -> Fraction | None:
    """None where there is none, or one of more digits, or a larger exponent, than `_MAX_DIGITS`."""
    numbers = _NUMBER.findall(text)
    if not numbers or max(map(len, numbers[-1])) > _MAX_DIGITS:
        return None
    digits, exponent = numbers[-1]
    power = int(exponent or 0)
    if abs(power) > _MAX_DIGITS:
        return None
    return Fraction(digits.replace(",", "")) * Fraction(10) ** power
