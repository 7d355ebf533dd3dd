from __future__ import annotations

import pytest

from torchtitan_rl.environments.scoring import last_match, score_text


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        ("", "  7\n", "7"),
        (r"#### (.+)", "#### 6\nno:\n#### 7 ", "7"),
        (r"\d+", "6 or 7", "7"),
        (r"#### (.+)", "seven", None),
        (r"a(b)?", "a", ""),
    ],
)
def test_the_answer_is_the_last_match(pattern: str, text: str, answer: str | None) -> None:
    assert last_match(pattern, text) == answer


@pytest.mark.parametrize(
    ("right", "answer", "score"),
    [
        ("72", "so it is 72.", 1.0),
        ("1,200", "$1200.00", 1.0),
        ("-3", "minus: -3", 1.0),
        ("0.5", ".5", 1.0),
        ("3", "10-3", 1.0),
        ("2", "f(1)-2", 1.0),
        ("-3", "x=-3", 1.0),
        ("1e5", "100,000", 1.0),
        ("0.0125", "1.25E-2", 1.0),
        ("5", "1e5", 0.0),
        ("72", "72 or 73", 0.0),
        ("72", "none", 0.0),
        ("none", "none", 0.0),
        ("72", "7" * 10_000, 0.0),
        ("72", "72e999999999", 0.0),
        ("72", "72e-" + "9" * 10_000, 0.0),
    ],
)
def test_numbers_are_compared_by_value(right: str, answer: str, score: float) -> None:
    assert score_text("number", right, answer) == score


def test_texts_are_compared_without_the_space_around_them() -> None:
    assert score_text("exact", "ab c", " ab c\n") == 1.0
    assert score_text("exact", "ab c", "ab  c") == 0.0


@pytest.mark.parametrize(
    ("right", "answer", "score"),
    [
        ("72", "72 dollars", 1.0),
        ("1,200", "1200", 1.0),
        ("1/2", "0.5", 1.0),
        (r"\frac{1}{2}", r"$\dfrac12$", 1.0),
        (r"\boxed{x+1}", "$1+x$", 1.0),
        ("72", "73", 0.0),
        ("72", "\\", 0.0),
    ],
)
def test_mathematics_is_compared_by_meaning(right: str, answer: str, score: float) -> None:
    pytest.importorskip("math_verify")
    from torchtitan_rl.environments.math_score import math_score

    assert math_score(right, answer) == score
