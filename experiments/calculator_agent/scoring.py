"""The reward of a solution, from 0 to 1.

1 if the last number of the answer is right, however it was found; 0.3 if the calculator showed the
right number; 0.1 if a call had a result. The partial rewards give a gradient before the first right
answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

from torchtitan_rl.experiments.calculator_agent.agent import Solution

RIGHT_ANSWER = 1.0
RIGHT_RESULT = 0.3
VALID_CALL = 0.1

_MAX_DIGITS = 100
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def score(solution: Solution, right_answer: int) -> float:
    """The best of the four: right answer, right result, a call that had a result, nothing."""
    if is_right(solution, right_answer):
        return RIGHT_ANSWER
    if str(right_answer) in solution.results:
        return RIGHT_RESULT
    return VALID_CALL if solution.results else 0.0


def is_right(solution: Solution, right_answer: int) -> bool:
    """Whether the last number of the answer is ``right_answer``."""
    numbers = _NUMBER.findall(solution.answer or "")
    if not numbers or len(numbers[-1]) > _MAX_DIGITS:
        return False
    return Fraction(numbers[-1]) == right_answer
