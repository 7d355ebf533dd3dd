"""Calls that hang beyond their time-out are counted, named and bounded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.support.rollouts import PROBLEM, BlockingEnv, make_rollouter
from torchtitan_rl.rollout import calls, session
from torchtitan_rl.rollout.calls import (
    AbandonedCalls,
    CallTimeoutError,
    HangingCallsError,
    within,
)
from torchtitan_rl.rollout.env import threaded
from torchtitan_rl.rollout.run import request_seed


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[AbandonedCalls]:
    """A new instance for the whole process: three calls that hang are too many."""
    own = AbandonedCalls(max_hanging=3, hangs_after_s=0.0)
    for module in (calls, session):
        monkeypatch.setattr(module, "abandoned", own)
    yield own
    assert own.num_running == 0


def test_a_task_that_ignores_its_cancellation_counts_too(abandoned: AbandonedCalls):
    async def scenario():
        release = asyncio.Event()

        async def deaf():
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        with pytest.raises(CallTimeoutError):
            await within(0.01, deaf)
        assert abandoned.names().endswith("deaf: 1")
        release.set()
        await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_run_whose_environment_keeps_hanging_fails_with_an_error_that_names_the_call(
    abandoned: AbandonedCalls,
):
    release = threading.Event()
    closed: list[int] = []

    class Stuck(BlockingEnv):
        def step(self, completion):
            release.wait()

        def close(self):
            closed.append(1)

    async def scenario():
        rollouter = make_rollouter(lambda problem: threaded(Stuck()), step_timeout_s=0.01)
        group = await rollouter.run_group("a", PROBLEM, size=2, seed=0)
        assert {rollout.status for rollout in group.rollouts} == {"step_timeout"}
        await rollouter.run_group("b", PROBLEM, size=1, seed=0)
        with pytest.raises(ExceptionGroup) as failure:
            await rollouter.run_group("c", PROBLEM, size=1, seed=0)
        (error,) = failure.value.exceptions
        assert isinstance(error, HangingCallsError)
        assert str(error).startswith("3 calls have hung")
        assert "Stuck.step: 3" in str(error)
        assert len(closed) == 4  # also the one that could not go on
        release.set()
        while abandoned.num_running:
            await asyncio.sleep(0.001)
        await rollouter.run_group("d", PROBLEM, size=1, seed=0)

    asyncio.run(scenario())


def test_a_process_with_hanging_calls_can_still_exit():
    program = """
import asyncio, threading
from torchtitan_rl.rollout.calls import CallTimeoutError, in_thread, within

async def main():
    try:
        await within(0.01, in_thread, threading.Event().wait)
    except CallTimeoutError:
        print("timed out")

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=True
    )
    assert done.stdout == b"timed out\n"


def test_seeds_are_the_same_in_every_process_and_version():
    assert request_seed(0, "g0/r0", 0) == 7547325789847896400
