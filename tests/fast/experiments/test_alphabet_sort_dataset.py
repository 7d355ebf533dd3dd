from __future__ import annotations

from torchtitan_rl.experiments.alphabet_sort.dataset import ProblemSizes, make_problem
from torchtitan_rl.experiments.alphabet_sort.names import NAMES

SIZES = ProblemSizes(min_turns=1, max_turns=3, min_names=2, max_names=4)


def test_names_are_distinct_and_in_alphabetical_order() -> None:
    assert list(NAMES) == sorted(set(NAMES))


def test_a_problem_has_the_configured_turns_and_names_and_no_name_twice() -> None:
    for index in range(200):
        turns = make_problem("train", index, SIZES).data["turns"]
        names = [name for turn in turns for name in turn]
        assert 1 <= len(turns) <= 3
        assert all(2 <= len(turn) <= 4 for turn in turns)
        assert len(names) == len(set(names))


def test_turns_and_names_vary_between_problems() -> None:
    problems = [make_problem("train", index, SIZES).data["turns"] for index in range(50)]
    assert {len(turns) for turns in problems} == {1, 2, 3}
    assert {len(turn) for turns in problems for turn in turns} == {2, 3, 4}
