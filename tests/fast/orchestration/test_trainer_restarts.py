"""A trainer that is lost and started again, in whole simulated runs. The campaign (`--of restarts`)
loses trainers at every call of many plans."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.simulated_faults import Strike, Strikes
from tests.support.simulated_trainer import SimTrainer
from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import DeadlineError, TrainerLostError
from torchtitan_rl.failures import Sign
from torchtitan_rl.orchestration import taken_steps
from torchtitan_rl.routing.replicas import Phase

PLAN = Plan(num_steps=7, checkpoint_every=2, trainer_restarts=2)


def run(root: Path, plan: Plan = PLAN, **actions: str) -> Simulation:
    """Run a plan in which ``trainer_publish_1="lost"`` loses the trainer at its second publish."""
    strikes = Strikes({_call(name): action for name, action in actions.items()})

    async def work() -> Simulation:
        simulation = Simulation(plan, root, fate=strikes)
        try:
            await simulation.run()
        except TrainerLostError as error:
            simulation.said.append(f"ended: {error}")
        return simulation

    simulation: Simulation = run_virtually(work())
    return simulation


def _call(name: str) -> tuple[str, int]:
    part, _, rest = name.partition("_")
    method, _, number = rest.rpartition("_")
    return f"{part}.{method}", int(number)


@pytest.mark.parametrize(
    ("call", "action"),
    [
        ("train_step_0", "lost"),
        ("train_step_4", "lost_after"),
        ("train_step_4", "late"),
        ("publish_3", "lost_after"),
        ("save_checkpoint_1", "lost"),
    ],
)
def test_a_run_whose_trainer_is_lost_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, call: str, action: str
) -> None:
    whole = run(tmp_path / "whole")
    disturbed = run(tmp_path / "disturbed", **{f"trainer_{call}": action})
    (failure,) = disturbed.failures
    assert failure.serve_s is not None
    assert failure.sign is (Sign.SILENT if action == "late" else Sign.ERROR)
    assert disturbed.trainer is not whole.trainer
    assert disturbed.trainer.weights == whole.trainer.weights
    assert disturbed.recorder.steps[-1].step == 7
    assert not (tmp_path / "disturbed" / "steps").exists()


def test_only_the_steps_since_a_checkpoint_are_taken_again(tmp_path: Path) -> None:
    simulation = run(tmp_path, trainer_train_step_5="lost")
    assert "from step-000004; 1 steps are taken again" in simulation.said[0]
    assert simulation.failures[0].steps_again == 1
    assert len(simulation.trainer.batches) == 3  # the fifth again, the sixth and the seventh


def test_batches_are_held_only_until_a_checkpoint_follows(tmp_path: Path) -> None:
    held = []

    class Watching(Strikes):
        def at(self, point: str) -> Strike | None:
            if point == "trainer.publish":
                held.append(len(list((tmp_path / "steps").glob("*"))))
            return super().at(point)

    async def work() -> None:
        plan = replace(PLAN, num_steps=12)
        await Simulation(plan, tmp_path, fate=Watching({})).run()

    run_virtually(work())
    # Two steps between checkpoints, one while a checkpoint is being written, and the steps of the
    # version before, which replicas may still read.
    assert max(held[4:]) <= 4


def test_replicas_read_a_version_that_a_dead_trainer_published_from_its_successor(
    tmp_path: Path,
) -> None:
    plan = replace(PLAN, staleness=2, restart_s=400.0)  # longer than a fetch may take
    simulation = run(tmp_path, plan, trainer_publish_3="lost_soon")
    assert simulation.failures[0].serve_s is not None
    assert simulation.router.states() == {"r0": Phase.SERVING, "r1": Phase.SERVING}
    assert {replica.version for replica in simulation.replicas} == {7}


def test_a_trainer_that_is_lost_at_the_same_step_again_and_again_ends_the_run(
    tmp_path: Path,
) -> None:
    lost = {f"trainer_train_step_{number}": "lost" for number in range(3, 20)}
    simulation = run(tmp_path, **lost)
    assert simulation.said[-1] == (
        "ended: a process of the trainer died; it was started again 2 times without a new step"
    )
    assert simulation.controller.step == 3
    between = {f"trainer_train_step_{number}": "lost" for number in (3, 8, 14)}
    simulation = run(tmp_path / "steps between", replace(PLAN, num_steps=11), **between)
    assert len(simulation.failures) == 3
    assert simulation.controller.step == 11


def test_a_batch_that_cannot_be_stored_is_told_and_then_a_loss_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taken_steps, "MAX_BYTES", 10)
    simulation = run(tmp_path, trainer_train_step_3="lost")
    assert simulation.said[0].startswith("until the next checkpoint a lost trainer ends the run")
    assert "because a batch was not stored" in simulation.said[-1]
    assert simulation.controller.step == 3


@pytest.mark.parametrize("version", [2, PLAN.num_steps])
def test_a_trainer_that_never_ends_a_checkpoint_is_replaced_at_the_end_of_the_run_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    whole = run(tmp_path / "whole")
    finish, hung = SimTrainer.finish_checkpoint, []

    async def hang_once(trainer: SimTrainer) -> None:
        if not hung and trainer.version >= version:
            hung.append(trainer)
            raise DeadlineError("trainer: writing of a checkpoint took too long")
        await finish(trainer)

    monkeypatch.setattr(SimTrainer, "finish_checkpoint", hang_once)
    disturbed = run(tmp_path / "disturbed")
    (failure,) = disturbed.failures
    assert failure.serve_s is not None
    assert failure.sign is Sign.SILENT
    assert disturbed.trainer.weights == whole.trainer.weights
    assert disturbed.trainer is not hung[0]


def test_a_batch_that_does_not_fit_on_the_disk_leaves_no_part_of_it(tmp_path: Path) -> None:
    simulation = run(tmp_path / "run")
    steps = taken_steps.TakenSteps(tmp_path / "steps")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # Python ignores its signal
    try:
        with pytest.raises(OSError, match="File too large"):
            steps.write(0, simulation.trainer.batches[0], None, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "steps").iterdir()) == []


def test_a_trainer_that_is_lost_while_its_run_ends_is_not_started_again(tmp_path: Path) -> None:
    """A call may still run then (campaign seed 37001079)."""

    async def work() -> None:
        simulation = Simulation(PLAN, tmp_path)
        await simulation.run()
        assert simulation.restarted is not None
        simulation.trainer.lose()
        with pytest.raises(TrainerLostError, match="the run has ended"):
            await simulation.restarted.offload()
        assert simulation.trainer.successor is None
        assert simulation.failures == []

    run_virtually(work())


@pytest.mark.parametrize("moment", ["at once", "offloaded", "close", "start", "delay"])
def test_a_loss_is_reported_at_whatever_moment_of_the_restart_the_run_ends(
    tmp_path: Path, moment: str
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def fail() -> SimTrainer:
        raise TrainerLostError("it did not start")

    async def work() -> None:
        simulation = Simulation(PLAN, tmp_path)
        restarted, lost = simulation.restarted, simulation.trainer
        assert restarted is not None
        if moment == "close":
            lost.close = never
        restarted.start = fail if moment == "delay" else never
        restarted.is_offloaded = moment == "offloaded"
        if moment == "at once":
            restarted._restart(lost, TrainerLostError("killed"))
        else:
            lost.lose(TrainerLostError("killed"))
            await asyncio.sleep(1.0)
        await restarted.close()
        (failure,) = simulation.failures
        assert failure.given_up == "the run ended first"

    run_virtually(work())


def test_a_loss_that_was_reported_is_not_reported_again(tmp_path: Path) -> None:
    """A call for the offloaded trainer sees it before the watch, and it is not started again."""

    async def see_later() -> None:
        await asyncio.sleep(0.5)
        raise TrainerLostError("killed")

    async def work() -> None:
        simulation = Simulation(replace(PLAN, during_step="asleep"), tmp_path)
        restarted = simulation.restarted
        assert restarted is not None
        assert restarted.is_offloaded
        restarted.max_restarts = 0
        restarted._watching.cancel()
        simulation.trainer.wait_until_lost = see_later
        restarted._watching = restarted._watched(simulation.trainer)
        restarted._restart(simulation.trainer, TrainerLostError("killed"))
        await asyncio.sleep(1.0)
        await restarted.close()
        assert len(simulation.failures) == 1

    run_virtually(work())
