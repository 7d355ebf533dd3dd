"""Simulated lives of a run: to its end, to its error, to a stop request or to a kill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually


def live(
    plan: Plan,
    root: Path,
    *,
    resume: bool = False,
    prepare: Callable[[Simulation], object] | None = None,
    stop_after: float | None = None,
    kill_after: float | None = None,
) -> tuple[Simulation, BaseException | None]:
    """One life and its error; a kill has none.

    Args:
        prepare: changes the simulation before it begins.
        stop_after: seconds after which a stop is requested.
        kill_after: seconds after which nothing is saved any more, as with kill -9.
    """

    async def work() -> tuple[Simulation, BaseException | None]:
        simulation = Simulation(plan, root)
        if prepare is not None:
            prepare(simulation)
        running = asyncio.create_task(simulation.run(resume=resume))
        if stop_after is not None:
            await asyncio.wait({running}, timeout=stop_after)
            simulation.controller.request_stop()
        if kill_after is not None:
            await asyncio.wait({running}, timeout=kill_after)
            simulation.trainer.save_checkpoint = None  # type: ignore[method-assign, assignment]
            running.cancel()
        await asyncio.wait({running})
        return simulation, None if running.cancelled() else running.exception()

    result: tuple[Simulation, BaseException | None] = run_virtually(work())
    return result


def run(plan: Plan, root: Path, *, resume: bool = False) -> Simulation:
    """A life that ends without an error."""
    simulation, error = live(plan, root, resume=resume)
    if error is not None:
        raise error
    return simulation


def require_nothing_lost(simulation: Simulation) -> None:
    """All steps were taken, none with tokens older than allowed; no token is lost or unaccounted
    for, and no rollout failed."""
    assert simulation.controller.step == simulation.plan.num_steps
    records = simulation.recorder.accounts
    assert [(one.lost, one.unaccounted) for one in records] == [(0, 0)] * len(records)
    assert max(simulation.trainer.ages) <= simulation.plan.staleness
    groups = [group for record in simulation.recorder.steps for group in record.groups]
    assert not any(one.status.is_failure for group in groups for one in group.rollouts)


def failing(
    method: str,
    number: int,
    error: BaseException,
    *,
    after: bool = False,
    of: str = "trainer",
    forever: bool = False,
) -> Callable[[Simulation], None]:
    """Let call ``number`` (from 1) of a method of the trainer, or of another part, raise.

    Args:
        after: it raises after its work.
        forever: so do all later calls.
    """

    def prepare(simulation: Simulation) -> None:
        part = getattr(simulation, of)
        original, calls = getattr(part, method), 0

        async def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            fails = calls >= number if forever else calls == number
            if fails and not after:
                raise error
            answer = await original(*args, **options)
            if fails:
                raise error
            return answer

        setattr(part, method, wrapped)

    return prepare
