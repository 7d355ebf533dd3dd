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
MANY_SKIPPED = replace(PLAN, reward_levels=2, env_delay_s=9.0)  # more than a batch in some steps
ALL_SKIPPED = replace(PLAN, num_steps=2, reward_levels=1, max_empty_batches=2)


def adapt(simulation: Simulation) -> None:
    """Let the dataset choose by what it was told: it leaves out a problem for each solved half."""
    dataset: Any = simulation.dataset
    dataset.told = []
    given, state_dict, load_state_dict = dataset.next, dataset.state_dict, dataset.load_state_dict

    def record(outcomes: Sequence[Outcome]) -> None:
        dataset.told += [[one.problem.problem_id, one.solved] for one in outcomes]

    def next_problem() -> Any:
        if sum(1 + (solved or 0) for _, solved in dataset.told) % 2:
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


@pytest.mark.parametrize("plan", [MANY_SKIPPED, ALL_SKIPPED])
def test_what_it_is_told_does_not_depend_on_which_group_ends_first(
    tmp_path: Path, plan: Plan
) -> None:
    runs = [told(replace(plan, chance=chance), tmp_path / str(chance))[0] for chance in range(2)]
    runs.append(told(replace(plan, is_even=True), tmp_path / "even")[0])
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize(("plan", "kill_after"), [(PLAN, 12.0), (MANY_SKIPPED, 25.0)])
def test_a_resumed_run_tells_what_the_uninterrupted_one_did(
    tmp_path: Path, kill_after: float, plan: Plan
) -> None:
    expected, whole = told(plan, tmp_path / "whole")
    told(plan, tmp_path / "killed", kill_after=kill_after)
    found, resumed = told(plan, tmp_path / "killed", resume=True)
    assert found == expected
    measured = {record.step: record.dataset for record in whole.recorder.steps}
    for record in resumed.recorder.steps:
        assert record.dataset == measured[record.step]
    assert resumed.trainer.weights == whole.trainer.weights


def test_groups_that_were_skipped_before_a_stop_are_told_after_it(tmp_path: Path) -> None:
    expected, _ = told(MANY_SKIPPED, tmp_path / "whole")
    for stop_after in (2.0, 14.0, 31.0):
        root = tmp_path / str(stop_after)
        told(MANY_SKIPPED, root, stop_after=stop_after)
        assert told(MANY_SKIPPED, root, resume=True)[0] == expected


def test_a_dataset_is_told_of_a_skipped_batch_and_may_choose_others(tmp_path: Path) -> None:
    def get_harder(simulation: Simulation) -> None:
        adapt(simulation)
        dataset: Any = simulation.dataset
        record = dataset.record

        def record_and_change(outcomes: Sequence[Outcome]) -> None:
            record(outcomes)
            object.__setattr__(simulation.plan, "reward_levels", 5)

        dataset.record = record_and_change

    simulation, error = live(replace(ALL_SKIPPED), tmp_path, prepare=get_harder)
    assert error is None
    assert simulation.ledger.totals().groups_trained == 6


def test_a_dataset_that_never_gives_others_ends_the_run(tmp_path: Path) -> None:
    simulation, error = live(ALL_SKIPPED, tmp_path, prepare=adapt)
    dataset: Any = simulation.dataset
    assert "60 groups in a row had rewards that do not differ" in str(error)
    assert len(dataset.told) >= 50
