from __future__ import annotations

import json

import pytest

from torchtitan_rl.experiments.alphabet_sort.dataset import (
    AlphabetSortDataset,
    ProblemSizes,
    make_problem,
)
from torchtitan_rl.experiments.alphabet_sort.names import NAMES
from torchtitan_rl.rollout.task import Split
from torchtitan_rl.types import Problem

SIZES = ProblemSizes(min_turns=1, max_turns=3, min_names=2, max_names=4)


def dataset(
    split: Split = "train", *, seed: int = 0, num_problems: int = 20
) -> AlphabetSortDataset:
    return AlphabetSortDataset(split, seed=seed, sizes=SIZES, num_problems=num_problems)


def take(source: AlphabetSortDataset, count: int) -> list[Problem]:
    return [source.next() for _ in range(count)]


def ids(problems: list[Problem]) -> list[str]:
    return [problem.problem_id for problem in problems]


def name_sets(split: Split, sizes: ProblemSizes) -> set[frozenset[str]]:
    problems = [make_problem(split, index, sizes) for index in range(400)]
    return {
        frozenset(name for turn in problem.data["turns"] for name in turn) for problem in problems
    }


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


def test_no_problem_of_one_split_is_in_the_other() -> None:
    # Few possible name lists, so that an accidental overlap would be certain.
    pairs = ProblemSizes(min_turns=1, max_turns=1, min_names=1, max_names=1)
    train, validation = name_sets("train", pairs), name_sets("validation", pairs)
    assert train
    assert validation
    assert not train & validation


def test_a_problem_id_means_the_same_problem_whatever_the_seed() -> None:
    first = {problem.problem_id: problem for problem in take(dataset(seed=1), 20)}
    second = {problem.problem_id: problem for problem in take(dataset(seed=2), 20)}
    assert first == second
    assert list(first) != list(second)


def test_each_epoch_has_every_problem_once_in_an_order_of_its_own() -> None:
    source = dataset()
    epochs = [ids(take(source, 20)) for _ in range(3)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_epoch_is_that_of_the_problem_returned_last() -> None:
    source = dataset(num_problems=3)
    epochs = []
    for _ in range(7):
        source.next()
        epochs.append(source.epoch)
    assert epochs == [0, 0, 0, 1, 1, 1, 2]


def test_validation_problems_are_the_same_in_every_run_and_epoch() -> None:
    one, other = dataset("validation", seed=1), dataset("validation", seed=2)
    assert take(one, 20) == take(other, 20) == take(one, 20)


@pytest.mark.parametrize("taken", [0, 7, 20, 33, 40])
def test_a_dataset_that_is_resumed_continues_with_the_same_problems(taken: int) -> None:
    source = dataset(seed=5)
    take(source, taken)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = dataset(seed=6)  # the saved run's seed holds
    resumed.load_state_dict(state)
    assert resumed.epoch == source.epoch
    assert take(resumed, 50) == take(source, 50)


def test_a_split_that_does_not_exist_is_refused() -> None:
    """Its problems would be looked for without end."""
    with pytest.raises(ValueError, match="split is 'evaluation': give one of train, validation"):
        dataset("evaluation", seed=0)
