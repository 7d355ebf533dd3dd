"""Trainer and replicas on the same devices. Every simulated run asserts at its end that they never
used the devices together, and that no replica sampled without weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fast.orchestration.runs import run
from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.training.batch import StepOutput, TrainingBatch

SHARED = Plan(num_steps=6, during_step="asleep")


def test_at_staleness_0_shared_devices_train_what_separate_ones_do_bit_for_bit(
    tmp_path: Path,
) -> None:
    plan = replace(SHARED, validate_every=2, evaluation_problems=3, checkpoint_every=2)
    separate = replace(plan, during_step="running", chance=100)
    shared = run(plan, tmp_path / "shared")
    assert shared.trainer.weights == run(separate, tmp_path / "separate").trainer.weights
    assert shared.trainer.switches == 7  # six steps, and the end
    # Late groups are other ones by chance; here only their tokens must be in order.
    late = run(replace(plan, window=0.67), tmp_path / "late")
    for step, batch in enumerate(late.trainer.batches):
        assert (batch.versions[batch.loss_mask] == step).all()


def test_while_the_next_batch_is_there_the_trainer_keeps_the_devices(tmp_path: Path) -> None:
    # An evaluation that takes its time lets the buffer fill up to the brim.
    plan = replace(
        SHARED, num_steps=8, staleness=3, validate_every=4, evaluation_problems=200, turns=1
    )
    simulation = run(plan, tmp_path)
    assert simulation.trainer.version == 8
    assert simulation.trainer.switches < 8
    pulled = [sync for step in simulation.recorder.steps for sync in step.syncs]
    assert len(pulled) == simulation.trainer.switches - 2  # the last step's, and the end's
    records = simulation.recorder.evaluations
    assert [(record.step, record.version) for record in records] == [(0, 0), (4, 4), (8, 8)]


@pytest.mark.parametrize("chance", range(2))
def test_aborted_engines_stay_empty_while_the_trainer_works_whatever_is_pulled(
    tmp_path: Path, chance: int
) -> None:
    async def work() -> tuple[Simulation, list[int]]:
        # Batches are ready before the trainer is, so that pulls end within its steps.
        plan = Plan(num_steps=8, staleness=3, during_step="aborted", turns=1, chance=chance)
        simulation = Simulation(replace(plan, train_s=20.0), tmp_path)
        for replica in simulation.replicas:
            replica.pull_s = 4.0  # so that the next step may begin within a pull
        sampled: list[int] = []
        step = simulation.trainer.train_step

        async def counted(batch: TrainingBatch, **options: Any) -> StepOutput:
            before = sum(replica.sampled for replica in simulation.replicas)
            output = await step(batch, **options)
            sampled.append(sum(replica.sampled for replica in simulation.replicas) - before)
            return output

        simulation.trainer.train_step = counted  # type: ignore[method-assign]
        await simulation.run()
        return simulation, sampled

    simulation, sampled = run_virtually(work())
    assert sampled == [0] * 8
    assert simulation.trainer.version == 8


def test_evaluation_is_not_cut_while_the_trainer_works(tmp_path: Path) -> None:
    plan = Plan(num_steps=6, staleness=1, during_step="aborted")
    plan = replace(plan, validate_every=1, evaluation_problems=8, train_s=4.0)
    simulation = run(plan, tmp_path)
    assert len(simulation.recorder.evaluations) == 7
    assert not any("#" in name for name in simulation.requested if "validation" in name)


def test_a_pin_that_begins_within_a_pause_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    """One replica: its pull waits for the pin, and the resume for the pull."""

    async def work() -> float:
        plan = Plan(num_steps=6, staleness=3, during_step="aborted", replicas=1, turns=1)
        plan = replace(plan, validate_every=1, evaluation_problems=2, train_s=0.5)
        await Simulation(plan, tmp_path).run()
        return asyncio.get_running_loop().time()

    assert run_virtually(work()) < 30.0  # a pull that waits gives up after `lag_timeout_s`, 30 s
