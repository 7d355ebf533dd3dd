from __future__ import annotations

import doctest
import json

import pytest

from torchtitan_rl import ListDataset, Problem
from torchtitan_rl.data import row_dataset
from torchtitan_rl.data.rows import DataError

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


def test_it_continues_where_its_state_was_taken() -> None:
    dataset = ListDataset(PROBLEMS, seed=1)
    taken(dataset, 9)
    state = json.loads(json.dumps(dataset.state_dict()))
    again = ListDataset(PROBLEMS, seed=2)
    again.load_state_dict(state)
    assert again.epoch == 1
    assert taken(again, 20) == taken(dataset, 20)
    with pytest.raises(DataError, match="the list has 3 problems; it had 7"):
        ListDataset(PROBLEMS[:3], seed=1).load_state_dict(state)


def test_its_example_runs() -> None:
    failed, attempted = doctest.testmod(row_dataset)
    assert (failed, attempted > 0) == (0, True)
