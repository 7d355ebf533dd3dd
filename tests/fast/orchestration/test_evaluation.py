"""Evaluations whose replica is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.simulated_faults import Strikes
from tests.support.simulated_replica import SimReplica
from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually

PLAN = Plan(num_steps=6, staleness=1, replicas=3, validate_every=2, evaluation_problems=4)


def evaluated(simulation: Simulation) -> list[tuple[int, int]]:
    return [(record.step, record.version) for record in simulation.recorder.evaluations]


async def next_evaluating(simulation: Simulation, *others: SimReplica) -> SimReplica:
    """The replica that answers requests of an evaluation, once one of them does."""
    while True:
        for replica in simulation.replicas:
            if replica not in others and replica.requested[-1:] > ["validation/"]:
                return replica
        await asyncio.sleep(0.01)


def test_an_evaluation_survives_the_loss_of_two_replicas(tmp_path: Path) -> None:
    async def work() -> Simulation:
        simulation = Simulation(PLAN, tmp_path)
        running = asyncio.create_task(simulation.run())
        first = await next_evaluating(simulation)
        first.die()
        (await next_evaluating(simulation, first)).die()
        await running
        return simulation

    simulation = run_virtually(work())
    assert evaluated(simulation) == [(0, 0), (2, 2), (4, 4), (6, 6)]
    said = [line for line in simulation.recorder.said if "after step 0 lost its replica" in line]
    assert len(said) == 2


def test_an_evaluation_that_no_replica_can_repeat_at_its_version_is_left_out(
    tmp_path: Path,
) -> None:
    async def work() -> Simulation:
        simulation = Simulation(replace(PLAN, evaluation_problems=60), tmp_path)
        running = asyncio.create_task(simulation.run())
        first = await next_evaluating(simulation)
        others = [replica for replica in simulation.replicas if replica is not first]
        while any(replica.version == 0 for replica in others):
            await asyncio.sleep(0.01)
        first.die()
        await running
        return simulation

    simulation = run_virtually(work())
    assert evaluated(simulation) == [(2, 2), (4, 4), (6, 6)]
    assert any(line.startswith("NO EVALUATION after step 0") for line in simulation.recorder.said)


def test_a_reserved_replica_that_cannot_pull_is_replaced_by_a_shared_one(tmp_path: Path) -> None:
    async def work() -> Simulation:
        plan = Plan(
            num_steps=4, staleness=1, validate_every=2, evaluation_problems=4, reserves=True
        )
        simulation = Simulation(plan, tmp_path)
        running = asyncio.create_task(simulation.run())
        while len(simulation.recorder.evaluations) == 0:
            await asyncio.sleep(0.01)
        simulation.replicas[-1].die()
        await running
        return simulation

    simulation = run_virtually(work())
    assert evaluated(simulation) == [(0, 0), (2, 2), (4, 4)]


@pytest.mark.parametrize("nth", range(1, 4))
def test_an_evaluation_gets_the_replica_that_takes_the_place_of_one_lost_before_a_pause(
    tmp_path: Path, nth: int
) -> None:
    """The only replica dies at one of its pulls while the trainer goes on to its next step, for
    which replicas pause."""
    plan = Plan(
        num_steps=4,
        groups_per_step=1,
        staleness=1,
        replicas=1,
        restarts=2,
        restart_s=0.5,
        during_step="aborted",
        train_s=1.0,
        validate_every=1,
        evaluation_problems=2,
    )
    fate = Strikes({("r0.pull", nth): "die"})

    async def work() -> Simulation:
        simulation = Simulation(plan, tmp_path, fate=fate)
        async with simulation.restarting():
            await simulation.run()
        return simulation

    simulation = run_virtually(work())
    assert [step for step, _ in evaluated(simulation)] == [0, 1, 2, 3, 4]
