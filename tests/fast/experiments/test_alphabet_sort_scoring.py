from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.experiments.alphabet_sort.scoring import right_answer, score, similarity

TURNS = [["Zoe", "Adam"], ["Kate", "Ben"], ["Carl"]]
LINES = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=8)


def test_the_first_turn_is_sorted_and_has_no_marks() -> None:
    assert right_answer(TURNS, 0) == ["Adam", "Zoe"]


def test_later_turns_merge_all_names_and_mark_only_those_of_their_own_message() -> None:
    assert right_answer(TURNS, 1) == ["Adam", "Ben // new", "Kate // new", "Zoe"]
    assert right_answer(TURNS, 2) == ["Adam", "Ben", "Carl // new", "Kate", "Zoe"]


def test_the_right_answer_scores_one_whatever_its_white_space() -> None:
    assert score("Adam\nZoe", TURNS, 0, power=2) == 1.0
    assert score("\n  Adam \n\n Zoe\n", TURNS, 0, power=2) == 1.0
    assert score("Adam\nBen  //  new\nKate // new\nZoe", TURNS, 1, power=2) == 1.0


def test_an_empty_answer_scores_zero() -> None:
    assert score("", TURNS, 0, power=2) == 0.0
    assert score(" \n", TURNS, 0, power=2) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "Adam\nKate // new\nBen // new\nZoe",  # two names in the wrong order
        "Adam\nBen\nKate // new\nZoe",  # a mark is missing
        "Adam // new\nBen // new\nKate // new\nZoe",  # a mark too many
    ],
)
def test_one_error_in_four_lines_costs_a_quarter(answer: str) -> None:
    assert score(answer, TURNS, 1, power=1) == pytest.approx(0.75)


def test_missing_and_superfluous_lines_cost() -> None:
    assert score("Adam\nBen // new\nZoe", TURNS, 1, power=1) == pytest.approx(6 / 7)
    assert score("Here:\nAdam\nZoe", TURNS, 0, power=1) == pytest.approx(4 / 5)


def test_a_higher_power_lowers_the_score_of_errors() -> None:
    answer = "Adam\nBen\nKate // new\nZoe"
    assert score(answer, TURNS, 1, power=2) == pytest.approx(0.75**2)


@given(LINES, LINES)
def test_similarity_is_symmetric_and_one_only_for_equal_lines(a: list[str], b: list[str]) -> None:
    assert similarity(a, b) == similarity(b, a)
    assert 0.0 <= similarity(a, b) <= 1.0
    assert (similarity(a, b) == 1.0) == (a == b)


@given(LINES, st.data())
def test_dropping_lines_leaves_the_rest_in_common(lines: list[str], data: st.DataObject) -> None:
    kept = [line for line in lines if data.draw(st.booleans())]
    expected = 2 * len(kept) / (len(kept) + len(lines)) if lines else 1.0
    assert similarity(kept, lines) == pytest.approx(expected)
