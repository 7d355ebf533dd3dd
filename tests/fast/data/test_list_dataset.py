from __future__ import annotations

import doctest

from torchtitan_rl import ListDataset, Problem
from torchtitan_rl.data import row_dataset

PROBLEMS = [Problem(problem_id=str(number), data={}) for number in range(7)]


def taken(dataset: ListDataset, number: int) -> list[str]:
    return [dataset.next().problem_id for _ in range(number)]


def test_each_epoch_has_every_problem_once_in_an_order_of_its_own() -> None:
    dataset = ListDataset(PROBLEMS, seed=1)
    assert dataset.epoch == 0
    first, ended = taken(dataset, 7), dataset.epoch
    second = taken(dataset, 7)
    assert (ended, dataset.epoch) == (0, 1)
    assert sorted(first) == sorted(second) == [problem.problem_id for problem in PROBLEMS]
    assert first != second
    assert first == taken(ListDataset(PROBLEMS, seed=1), 7)
    assert first != taken(ListDataset(PROBLEMS, seed=2), 7)


def test_its_example_runs() -> None:
    failed, attempted = doctest.testmod(row_dataset)
    assert (failed, attempted > 0) == (0, True)
