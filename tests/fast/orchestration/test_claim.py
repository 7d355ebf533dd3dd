"""A run whose folder another controller has taken over, at any moment of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import RunTakenOverError

PLAN = Plan(staleness=1, num_steps=6, checkpoint_every=1, validate_every=2)


class LostClaim:
    """Lost at a time of the loop. Without ``is_noticed``, only a write finds out."""

    def __init__(self, lost_s: float, *, is_noticed: bool) -> None:
        self.lost_s = lost_s
        self.is_noticed = is_noticed
        self.error = RunTakenOverError(Path("run"), "process 2 on node2")

    def check(self) -> None:
        if asyncio.get_running_loop().time() >= self.lost_s:
            raise self.error

    async def wait_until_lost(self) -> None:
        if not self.is_noticed:
            await asyncio.Event().wait()
        await asyncio.sleep(self.lost_s - asyncio.get_running_loop().time())
        raise self.error


def files(root: Path, *, but: str) -> dict[str, bytes]:
    paths = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {name: paths[name].read_bytes() for name in paths if not name.startswith(but)}


async def lose(root: Path, after_s: float, *, is_noticed: bool) -> BaseException | None:
    """The error of a run. What is in its folder when it is lost is there at its end, and nothing
    more, except a checkpoint that is being written at that moment."""
    start_s = asyncio.get_running_loop().time()
    claim = LostClaim(start_s + after_s, is_noticed=is_noticed)
    simulation = Simulation(PLAN, root, claim=claim)
    running = asyncio.create_task(simulation.run())
    await asyncio.wait({running}, timeout=after_s)
    if running.done():
        return running.exception()
    under_way = f"checkpoints/step-{simulation.controller.step:06d}/"
    before = files(root, but=under_way)
    await asyncio.wait({running})
    assert files(root, but=under_way) == before
    return running.exception()


@pytest.mark.parametrize("is_noticed", [True, False])
def test_nothing_is_written_once_the_folder_is_lost(tmp_path: Path, is_noticed: bool) -> None:
    endings = []
    for number in range(8):
        root = tmp_path / f"{number}"
        endings.append(run_virtually(lose(root, 0.37 + 4.2 * number, is_noticed=is_noticed)))
    assert all(isinstance(error, RunTakenOverError) for error in endings if error is not None)
    assert sum(error is not None for error in endings) > 3
    assert endings[-1] is None  # lost after its end
