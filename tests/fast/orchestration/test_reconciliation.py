"""Comparisons of the ledger with what the replicas sampled, one at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually


def test_a_comparison_that_still_runs_is_recorded_before_the_last_one(tmp_path: Path) -> None:
    async def work() -> list[int]:
        simulation = Simulation(Plan(), tmp_path)
        reconciliation = simulation.controller._reconciliation
        original, delays = simulation.router.account, [10.0, 1.0]

        async def slow() -> Any:
            await asyncio.sleep(delays.pop(0))
            return await original()

        simulation.router.account = slow  # type: ignore[method-assign]
        reconciliation.start(0, 0)
        await asyncio.sleep(1.0)
        reconciliation.start(0, 0)  # no second one while the first runs
        await reconciliation.finish(3, 3)
        return [record.step for record in simulation.recorder.accounts]

    assert run_virtually(work()) == [0, 3]
