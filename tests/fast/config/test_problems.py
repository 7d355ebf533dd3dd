from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_mutations import with_value
from torchtitan_rl.bounds import field_errors
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.config.problems import evaluation_problems, training_errors
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.task import Dataset, Split, Task
from torchtitan_rl.types import Problem

LAPTOP = HostFacts(num_cores=2, memory_bytes=24 << 30)


class Listed:
    """The ids of one epoch, over and over, or once."""

    def __init__(self, ids: tuple[str, ...], *, is_endless: bool, counts_epochs: bool) -> None:
        self._ids, self._is_endless, self._counts_epochs = ids, is_endless, counts_epochs
        self._taken = 0

    @property
    def epoch(self) -> int:
        return (self._taken - 1) // len(self._ids) if self._counts_epochs else 0

    def next(self) -> Problem:
        if self._taken == len(self._ids) and not self._is_endless:
            raise StopIteration
        self._taken += 1
        return Problem(problem_id=self._ids[(self._taken - 1) % len(self._ids)], data={})

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = state["taken"]


@dataclass(frozen=True, kw_only=True)
class ListedTask(Task):
    train: tuple[str, ...] = ("a", "b", "c")
    validation: tuple[str, ...] = ("v", "w", "x")
    is_endless: bool = True
    counts_epochs: bool = True

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        ids = self.train if split == "train" else self.validation
        return Listed(ids, is_endless=self.is_endless, counts_epochs=self.counts_epochs)


class BrokenTask(Task):
    def dataset(self, split: Split, *, seed: int) -> Dataset:
        raise FileNotFoundError(f"no file\nfor {split}")


@dataclass(frozen=True, kw_only=True)
class Lengths:
    most: int = 5
    mean: float = 2.0


@dataclass(frozen=True, kw_only=True)
class TaskWithParts(ListedTask):
    lengths: Lengths = Lengths()


def config(task: Task, *, num_problems: int = 3, groups: int = 2, steps: int = 4) -> RunConfig:
    changes = {
        "task": task,
        "evaluation.num_problems": num_problems,
        "rollout.groups_per_step": groups,
        "num_steps": steps,
    }
    changed = TINY
    for name, value in changes.items():
        changed = with_value(changed, name, value)
    return changed


def test_the_parts_of_a_task_are_checked_by_type_only() -> None:
    assert not field_errors(config(TaskWithParts()))
    wrong = config(TaskWithParts(lengths=Lengths(most="5", mean=float("nan"))))  # type: ignore[arg-type]
    assert set(field_errors(wrong)) == {"task.lengths.most", "task.lengths.mean"}


@pytest.mark.parametrize("is_endless", [True, False])
def test_more_evaluation_problems_than_the_set_has_are_refused(is_endless: bool) -> None:
    with pytest.raises(ConfigError) as refused:
        evaluation_problems(config(ListedTask(is_endless=is_endless), num_problems=4))
    assert str(refused.value) == (
        "evaluation.num_problems is 4: the validation set has 3 problems; give at most that"
    )


def test_an_id_that_comes_twice_in_the_validation_set_is_named() -> None:
    with pytest.raises(ConfigError, match="problem w comes twice in the validation set"):
        evaluation_problems(config(ListedTask(validation=("v", "w", "w"))))


def test_a_training_id_that_comes_twice_in_an_epoch_is_refused() -> None:
    (error,) = training_errors(config(ListedTask(train=("a", "b", "a"))))
    assert error.startswith("task is ListedTask: training problem a of epoch 0 comes twice")
    (error,) = training_errors(config(ListedTask(counts_epochs=False)))
    assert "count epochs" in error


def test_a_training_set_that_ends_too_early_is_refused() -> None:
    (error,) = training_errors(config(ListedTask(is_endless=False)))
    assert error == (
        "num_steps is 4: with rollout.groups_per_step 2 it takes 8 training problems, and the "
        "dataset ends after 3; give fewer steps, or a dataset that starts again"
    )
    assert training_errors(config(ListedTask(is_endless=False), groups=1, steps=3)) == []


def test_a_dataset_that_fails_is_one_line_each() -> None:
    with pytest.raises(ConfigError) as refused:
        prepare_run(config(BrokenTask()), LAPTOP)
    assert [line for line in refused.value.errors if line.startswith("task: ")] == [
        "task: its validation dataset cannot be read (FileNotFoundError: no file for validation)",
        "task: its training dataset cannot be read (FileNotFoundError: no file for train)",
    ]


def test_a_prepared_run_has_its_evaluation_problems(tmp_path: Path) -> None:
    prepared = prepare_run(replace(TINY, output_dir=tmp_path), LAPTOP)
    assert len({problem.problem_id for problem in prepared.evaluation_problems}) == 128
    few = with_value(replace(TINY, output_dir=tmp_path), "task.num_validation_problems", 100)
    with pytest.raises(ConfigError) as refused:
        prepare_run(few, LAPTOP)
    (error,) = refused.value.errors
    assert error.startswith("evaluation.num_problems is 128: the validation set has 100 problems")
