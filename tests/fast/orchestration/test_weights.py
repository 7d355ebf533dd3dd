"""Published versions on their way to the replicas."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.orchestration.weights import PublishedStep, WeightDelivery
from torchtitan_rl.weights.distribution import SharedMemoryHandle


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


def test_a_version_that_waits_is_given_up_for_a_newer_one_unless_it_is_to_be_evaluated(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        _, feed = make_weights(tmp_path, Plan(validate_every=2, evaluation_problems=1))
        for step, needed in ((1, {1}), (2, {2}), (3, {2, 3}), (4, {2, 4})):
            feed.put(finished(step, step, has_weights=True))
            assert feed.needed_versions == needed

    run_virtually(work())


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


def test_weights_stay_readable_until_their_own_evaluation_has_a_replica(tmp_path: Path) -> None:
    async def work() -> None:
        plan = Plan(validate_every=1, evaluation_problems=200)
        parts, feed = make_weights(tmp_path, plan)
        running = asyncio.create_task(feed.run())
        await asyncio.sleep(0.1)
        feed.put(finished(1, 1, has_weights=True))
        await asyncio.sleep(2.0)
        assert 1 in parts.router.versions().values()
        assert not parts.recorder.evaluations  # that of step 1 waits for that of step 0
        assert feed.needed_versions == {1}
        await feed.flush()
        assert not feed.needed_versions
        running.cancel()
        await asyncio.wait({running})

    run_virtually(work())
