"""Processes that are killed or stopped (SIGSTOP), most of them while they start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path

import psutil
import pytest

from tests.real.models import tiny_model
from tests.real.router_scenario import spawn
from tests.real.trainer_helpers import CONFIG
from torchtitan_rl.aio import cancel_all
from torchtitan_rl.backends.monarch.runtime import spawn_processes, stop_processes, supervise
from torchtitan_rl.backends.monarch.trainer import MonarchTrainer
from torchtitan_rl.backends.specs import TrainerSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import (
    ProcessEndedError,
    ProcessLostError,
    ProcessStoppedError,
    TrainerLostError,
)
from torchtitan_rl.processes import MARK_VARIABLE

LIMIT_S = 30.0  # Monarch alone sees a stopped process after 40 s


def meshes() -> set[int]:
    """The children of this process that Monarch has started."""
    found = set()
    for child in psutil.Process().children():
        try:
            if MARK_VARIABLE in child.environ() and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
        except psutil.Error:
            continue
    return found


async def lose(work: Awaitable[object], others: set[int], number: int, after_s: float) -> None:
    """Send a signal to one of the processes that ``work`` starts, some time after it is there."""
    task = asyncio.ensure_future(work)
    while not (new := meshes() - others):
        assert not task.done()
        await asyncio.sleep(0.01)
    await asyncio.sleep(after_s)
    os.kill(min(new), number)
    async with asyncio.timeout(LIMIT_S):
        await task


@pytest.mark.parametrize("after_s", [0.0, 0.5])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_before_it_answers_is_seen_and_nothing_is_left(
    tmp_path: Path, number: int, after_s: float
) -> None:
    group = ProcessGroup(name="replica0", ranks=2, threads=1)
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(2)")  # a slow start
    slow = {"PYTHONPATH": str(tmp_path)}

    async def check() -> None:
        supervise()
        others = meshes()
        error = ProcessStoppedError if number == signal.SIGSTOP else ProcessLostError
        work = spawn_processes(group, log_dir=tmp_path, environment=slow)
        with pytest.raises(error, match="replica0"):
            await lose(work, others, number, after_s)
        assert meshes() == others

    asyncio.run(check())


@pytest.mark.parametrize("after_s", [0.001, 0.5])
def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path, after_s: float) -> None:
    group = ProcessGroup(name="replica0", ranks=4, threads=1)
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(2)")

    async def check() -> None:
        supervise()
        others = meshes()
        slow = {"PYTHONPATH": str(tmp_path)}
        work = asyncio.ensure_future(spawn_processes(group, log_dir=tmp_path, environment=slow))
        await asyncio.sleep(after_s)
        await cancel_all([work])
        for _ in range(20):
            assert meshes() == others
            await asyncio.sleep(0.1)

    asyncio.run(check())


def test_a_replica_that_is_stopped_while_it_builds_its_engine_is_seen_and_ended(
    tmp_path: Path,
) -> None:
    tiny_model(tmp_path / "model", tied=True, seed=0)

    async def check() -> None:
        supervise()
        others = meshes()
        replica = await spawn(tmp_path, 0)
        starting = asyncio.ensure_future(replica.peer.start())
        await asyncio.sleep(0.5)  # it imports vLLM
        with pytest.raises(ProcessStoppedError, match=r"replica0: process \d+ is stopped"):
            await lose(starting, others, signal.SIGSTOP, after_s=0.0)
        async with asyncio.timeout(LIMIT_S):
            await replica.close()
        assert meshes() == others

    asyncio.run(check())


def test_a_call_ends_with_what_the_kernel_says_of_the_process_even_if_monarch_is_quicker(
    tmp_path: Path,
) -> None:
    group = ProcessGroup(name="trainer", ranks=1, threads=1)

    async def check() -> None:
        supervise()
        others = meshes()
        mesh = await spawn_processes(group, log_dir=tmp_path)

        async def quicker() -> None:
            os.kill(min(meshes() - others), signal.SIGKILL)
            raise RuntimeError("the actor has failed")

        with pytest.raises(ProcessEndedError, match=r"trainer: process \d+ has ended"):
            await mesh.call(quicker(), what="step")
        await stop_processes(mesh)
        assert meshes() == others

    asyncio.run(check())


def test_a_lost_trainer_is_named_by_what_the_kernel_says_even_if_monarch_is_quicker(
    tmp_path: Path,
) -> None:
    spec = TrainerSpec(
        checkpoint=tmp_path,
        trainer=CONFIG,
        dtype="float32",
        seed=0,
        num_steps=1,
        run_dir=tmp_path,
        log_dir=tmp_path,
        trace_dir=None,
    )

    async def check() -> None:
        supervise()
        others = meshes()
        group = ProcessGroup(name="trainer", ranks=1, threads=1)
        trainer = await MonarchTrainer.spawn(group, spec)

        async def quicker() -> None:
            os.kill(min(meshes() - others), signal.SIGKILL)
            raise RuntimeError("the actor has failed")

        with pytest.raises(TrainerLostError) as raised:
            await trainer._wait(quicker(), "optimizer step")
        assert isinstance(raised.value.__cause__, ProcessEndedError)
        await trainer.close()
        assert meshes() == others

    asyncio.run(check())
