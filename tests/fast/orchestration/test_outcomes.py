"""What a dataset is told of the groups that it gave: each once, in an order that is the same in
every run, and nothing twice after a kill."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fast.orchestration.runs import live
from tests.support.simulation import Plan, Simulation
from torchtitan_rl.rollout.task import AdaptiveDataset, Outcome

PLAN = Plan(num_steps=8, checkpoint_every=2, zero_variance="skip", problems=5)


def adapt(simulation: Simulation) -> None:
    """Let the dataset choose by what it was told: it leaves out a problem for each solved half."""
    dataset: Any = simulation.dataset
    dataset.told = []
    given, state_dict, load_state_dict = dataset.next, dataset.state_dict, dataset.load_state_dict

    def record(outcomes: Sequence[Outcome]) -> None:
        dataset.told += [[one.problem.problem_id, one.solved] for one in outcomes]

    def next_problem() -> Any:
        if sum(len(name) + (solved or 0) for name, solved in dataset.told) % 2:
            given()
        return given()

    def load(state: dict[str, Any]) -> None:
        dataset.told = list(state["told"])
        load_state_dict(state)

    dataset.record, dataset.next = record, next_problem
    dataset.state_dict = lambda: json.loads(json.dumps({**state_dict(), "told": dataset.told}))
    dataset.load_state_dict = load
    dataset.metrics = lambda: {"told": float(len(dataset.told))}
    assert isinstance(dataset, AdaptiveDataset)


def told(plan: Plan, root: Path, **options: Any) -> tuple[list[Any], Simulation]:
    simulation, _ = live(plan, root, prepare=adapt, **options)
    dataset: Any = simulation.dataset
    return dataset.told, simulation


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_dataset_is_told_of_each_trained_and_each_skipped_group_once(
    tmp_path: Path, staleness: int
) -> None:
    found, simulation = told(replace(PLAN, staleness=staleness), tmp_path)
    totals = simulation.ledger.totals()
    skipped = totals.groups_discarded.get("zero_variance", 0)
    assert totals.groups_trained == 24
    assert skipped > 0
    trained = Counter(
        group.problem.problem_id for step in simulation.recorder.steps for group in step.groups
    )
    assert len(found) == 24 + skipped or staleness  # at S > 0 some are skipped after the last step
    assert not trained - Counter(name for name, _ in found)


def test_what_it_is_told_does_not_depend_on_which_group_ends_first(tmp_path: Path) -> None:
    runs = [told(replace(PLAN, chance=chance), tmp_path / str(chance))[0] for chance in range(4)]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("kill_after", [12.0, 25.0, 40.0])
def test_a_resumed_run_tells_what_the_uninterrupted_one_did(
    tmp_path: Path, kill_after: float
) -> None:
    expected, whole = told(PLAN, tmp_path / "whole")
    told(PLAN, tmp_path / "killed", kill_after=kill_after)
    found, resumed = told(PLAN, tmp_path / "killed", resume=True)
    assert found == expected
    measured = {record.step: record.dataset for record in whole.recorder.steps}
    for record in resumed.recorder.steps:
        assert record.dataset == measured[record.step]
    assert resumed.trainer.weights == whole.trainer.weights


def test_groups_that_were_skipped_before_a_stop_are_told_after_it(tmp_path: Path) -> None:
    expected, _ = told(PLAN, tmp_path / "whole")
    for stop_after in (5.0, 14.0, 23.0, 31.0):
        root = tmp_path / str(stop_after)
        told(PLAN, root, stop_after=stop_after)
        assert told(PLAN, root, resume=True)[0] == expected
