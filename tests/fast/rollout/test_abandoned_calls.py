"""Calls that hang beyond their time-out are counted, named and bounded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.support.rollouts import PROBLEM, BlockingEnv, make_rollouter
from torchtitan_rl.rollout import calls, env_session
from torchtitan_rl.rollout.abandoned import AbandonedCalls, HangingCallsError
from torchtitan_rl.rollout.calls import CallTimeoutError, in_thread, within
from torchtitan_rl.rollout.env import threaded


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[AbandonedCalls]:
    """A new instance for the whole process: three calls that hang are too many."""
    own = AbandonedCalls(max_hanging=3, hangs_after_s=0.0)
    for module in (calls, env_session):
        monkeypatch.setattr(module, "abandoned", own)
    yield own
    assert own.num_running == 0


def test_an_abandoned_thread_counts_until_it_ends(abandoned: AbandonedCalls):
    release, ended = threading.Event(), threading.Event()

    def hang():
        release.wait()
        ended.set()

    async def scenario():
        with pytest.raises(CallTimeoutError):
            await within(0.01, in_thread, hang)
        assert abandoned.num_running == 1
        assert abandoned.names().endswith("hang: 1")
        release.set()
        while abandoned.num_running:
            await asyncio.sleep(0.001)
        assert ended.is_set()

    asyncio.run(scenario())


def test_a_call_that_ends_in_time_or_raises_is_never_counted(abandoned: AbandonedCalls):
    async def own_cancellation():
        raise asyncio.CancelledError

    async def scenario():
        for function in ((in_thread, int), (own_cancellation,)):
            await asyncio.gather(within(60.0, *function), return_exceptions=True)
        with pytest.raises(asyncio.CancelledError):
            await in_thread(lambda: (_ for _ in ()).throw(asyncio.CancelledError()))

    asyncio.run(scenario())


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


def test_calls_that_were_just_abandoned_do_not_end_a_run():
    now_s = 0.0
    own = AbandonedCalls(max_hanging=2, hangs_after_s=60.0, clock=lambda: now_s)
    for name in ("a", "b", "a"):
        own.add(object(), name)
    now_s = 59.0
    own.require_few()
    assert own.num_running == 3
    now_s = 60.0
    with pytest.raises(HangingCallsError, match="a: 2, b: 1"):
        own.require_few()


def test_their_number_is_logged_whenever_it_doubles(caplog: pytest.LogCaptureFixture):
    own = AbandonedCalls()
    for index in range(20):
        own.add(index, "Env.step")
    numbers = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert numbers == [1, 2, 4, 8, 16]


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
