from __future__ import annotations

import pytest

from torchtitan_rl.experiments.calculator_agent.agent import Solution
from torchtitan_rl.experiments.calculator_agent.scoring import is_right, score


def solution(answer: str | None, *results: str) -> Solution:
    return Solution(answer=answer, num_calls=len(results), results=results)


@pytest.mark.parametrize(
    ("solved", "reward"),
    [
        (solution("The answer is 14.", "14"), 1.0),
        (solution("The answer is 14."), 1.0),
        (solution("First 3, then 14", "7"), 1.0),
        (solution("14.0"), 1.0),
        (solution("The answer is 41.", "7", "14"), 0.3),
        (solution(None, "14"), 0.3),
        (solution("", "14"), 0.3),
        (solution("The answer is 7.", "7"), 0.1),
        (solution(None, "7"), 0.1),
        (solution("The answer is 7."), 0.0),
        (solution("14 is not it, 7 is."), 0.0),
        (solution("-14"), 0.0),
        (solution("114"), 0.0),
        (solution("no number"), 0.0),
        (solution(None), 0.0),
    ],
)
def test_a_right_answer_counts_most_then_a_right_result_then_any_result(
    solved: Solution, reward: float
) -> None:
    assert score(solved, 14) == reward
    assert is_right(solved, 14) == (reward == 1.0)


def test_a_call_without_a_result_scores_zero() -> None:
    assert score(Solution(answer="", num_calls=3, results=()), 14) == 0.0
