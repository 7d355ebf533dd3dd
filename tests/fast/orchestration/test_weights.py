"""Published versions on their way to the replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import TrainerLostError, WeightSyncError
from torchtitan_rl.orchestration.weights import PublishedStep, WeightDelivery
from torchtitan_rl.routing.pausing import PinnedReplica
from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.weights.handle import SharedMemoryHandle, WeightHandle


def finished(step: int, version: int, *, has_weights: bool) -> PublishedStep:
    handle = SharedMemoryHandle(version=version, path="", num_bytes=0) if has_weights else None
    return PublishedStep(step=step, version=version, handle=handle)


def make_weights(root: Path, plan: Plan) -> tuple[Simulation, WeightDelivery]:
    """Versions 1 to 3 are readable."""
    simulation = Simulation(plan, root)
    simulation.trainer.readable |= {1, 2, 3}
    return simulation, simulation.controller._weights


def versions_after(
    steps: list[PublishedStep], root: Path, plan: Plan | None = None
) -> tuple[set[int], list[int]]:
    """What the replicas hold when all steps, queued at once, are closed; and the pulls done."""

    async def work() -> tuple[set[int], list[int]]:
        parts, feed = make_weights(root, plan or Plan())
        for step in steps:
            feed.put(step)
        running = asyncio.create_task(feed.run())
        await feed.flush()
        await asyncio.sleep(10.0)  # a replica that was pinned pulls once its pin has ended
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        pulled = [sync.version for sync in feed.pop_syncs()]
        assert not feed.needed_versions
        evaluated = [(one.step, one.version) for one in parts.recorder.evaluations]
        assert evaluated == ([] if plan is None else [(0, 0), (2, 1)])
        return set(parts.router.versions().values()), pulled

    return run_virtually(work())


def test_the_weights_before_a_step_without_any_are_pulled_for_its_evaluation(
    tmp_path: Path,
) -> None:
    steps = [
        finished(1, 1, has_weights=True),
        finished(2, 1, has_weights=False),
        finished(3, 2, has_weights=True),
    ]
    plan = Plan(validate_every=2, evaluation_problems=1)
    assert versions_after(steps, tmp_path, plan) == ({2}, [1, 2])


def test_versions_that_wait_behind_an_evaluation_are_given_up_for_newer_ones(
    tmp_path: Path,
) -> None:
    async def work() -> int:
        plan = Plan(num_steps=8, staleness=3, turns=1, validate_every=8, evaluation_problems=200)
        parts = Simulation(plan, tmp_path)
        publish, most = parts.trainer.publish, 0

        async def counted(keep: frozenset[int] = frozenset()) -> SharedMemoryHandle:
            nonlocal most
            handle = await publish(keep)
            most = max(most, len(parts.trainer.readable))
            return handle

        parts.trainer.publish = counted  # type: ignore[method-assign]
        await parts.run()
        return most

    assert run_virtually(work()) <= 3  # the newest, the one before, and one that is being fetched


def test_the_weights_of_a_resumed_run_stay_readable_until_its_evaluation_has_a_replica(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        _, feed = make_weights(tmp_path, Plan())
        handle = SharedMemoryHandle(version=2, path="", num_bytes=0)
        await feed.resume(handle)
        assert feed.needed_versions == {2}
        running = asyncio.create_task(feed.run())
        await asyncio.sleep(1.0)
        assert not feed.needed_versions
        running.cancel()
        await asyncio.wait({running})

    run_virtually(work())


def test_an_evaluation_has_started_only_when_it_has_its_replica(tmp_path: Path) -> None:
    async def work() -> list[int]:
        simulation = Simulation(Plan(validate_every=1, evaluation_problems=1), tmp_path)
        evaluator, pin = simulation.controller._evaluator, simulation.router.pin
        is_free = asyncio.Event()

        @contextlib.asynccontextmanager
        async def pin_when_free(version: int) -> AsyncIterator[PinnedReplica]:
            await is_free.wait()
            async with pin(version) as pinned:
                yield pinned

        simulation.router.pin = pin_when_free  # type: ignore[method-assign]
        for step in (1, 2):
            is_free.clear()
            starting = asyncio.create_task(evaluator.start(step, 0))
            await asyncio.sleep(10.0)
            assert not starting.done()
            is_free.set()
            await starting
            assert evaluator.is_running
        await evaluator.finish()
        return [record.step for record in simulation.recorder.evaluations]

    assert run_virtually(work()) == [1, 2]


def test_the_loss_of_the_trainer_is_the_error_of_a_run_whose_replicas_cannot_fetch_its_weights(
    tmp_path: Path,
) -> None:
    async def work() -> list[str]:
        simulation = Simulation(Plan(num_steps=6, staleness=3, train_s=5.0), tmp_path)
        trainer, train_step = simulation.trainer, simulation.trainer.train_step

        async def stage(handle: WeightHandle) -> None:
            if handle.version == 2:
                raise WeightSyncError("version 2: cannot map it")

        async def lost_after_2(batch: TrainingBatch) -> StepOutput:
            if trainer.version < 2:
                return await train_step(batch)
            await asyncio.sleep(5.0)  # the replicas notice first
            raise TrainerLostError("gone")

        for replica in simulation.replicas:
            replica.stage = stage  # type: ignore[method-assign]
        trainer.train_step = lost_after_2  # type: ignore[method-assign]
        with pytest.raises(TrainerLostError, match="gone"):
            await simulation.run()
        return simulation.recorder.said

    assert any(
        "weight delivery: WeightSyncError: no replica" in line for line in run_virtually(work())
    )
