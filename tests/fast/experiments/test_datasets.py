"""What holds for the problems of every task here: see `experiments.procedural`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from torchtitan_rl.experiments.alphabet_sort.task import AlphabetSortTask
from torchtitan_rl.experiments.calculator_agent.task import CalculatorAgentTask
from torchtitan_rl.experiments.code_interpreter.task import CodeInterpreterTask
from torchtitan_rl.experiments.search.task import SearchTask
from torchtitan_rl.rollout.task import Dataset, Split
from torchtitan_rl.types import Problem

# Few possible problems, so that an accidental overlap would be certain.
TASKS: dict[str, Any] = {
    "alphabet_sort": AlphabetSortTask(max_turns=1, min_names=1, max_names=1),
    "calculator_agent": CalculatorAgentTask(two_operations=0.0, max_number=9),
    "code_interpreter": CodeInterpreterTask(max_number=20),
    "search": SearchTask(num_worlds=2),
}


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Any:
    return replace(TASKS[request.param], num_train_problems=20, num_validation_problems=20)


def take(source: Dataset, count: int) -> list[Problem]:
    return [source.next() for _ in range(count)]


def contents(problem: Problem) -> str:
    """Without what is only told differently."""
    return problem.data.get("expression") or json.dumps(problem.data)


def test_no_problem_of_one_split_is_in_the_other(task: Any) -> None:
    task = replace(task, num_train_problems=400, num_validation_problems=400)
    splits: tuple[Split, ...] = ("train", "validation")
    train, validation = (set(map(contents, take(task.dataset(s, seed=0), 400))) for s in splits)
    assert train
    assert validation
    assert not train & validation


def test_a_problem_id_means_the_same_problem_whatever_the_seed(task: Any) -> None:
    first, second = (
        {problem.problem_id: problem for problem in take(task.dataset("train", seed=seed), 20)}
        for seed in (1, 2)
    )
    assert first == second
    assert list(first) != list(second)


@pytest.mark.parametrize("taken", [0, 33])
def test_a_dataset_that_is_resumed_continues_with_the_same_problems(task: Any, taken: int) -> None:
    source = task.dataset("train", seed=5)
    take(source, taken)
    resumed = task.dataset("train", seed=6)  # the saved run's seed holds
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.epoch == source.epoch
    assert take(resumed, 50) == take(source, 50)
