"""Background tasks, work that a cancellation does not interrupt, and work that races."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.async_tests import on_event_loop
from torchtitan_rl.aio import BackgroundTask, first_of, uninterrupted


async def fail() -> None:
    raise KeyError("work")


async def cancelled_twice(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """The task of a call that is cancelled twice while it waits, and has then ended."""
    task = asyncio.create_task(call)
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait({task})
    return task


@on_event_loop
async def test_work_runs_to_its_end_however_often_the_call_is_cancelled() -> None:
    done: list[str] = []

    async def work() -> None:
        for _ in range(9):
            await asyncio.sleep(0)
        done.append("work")

    task = await cancelled_twice(uninterrupted(work(), on_cancel=lambda: done.append("cancel")))
    assert task.cancelled()
    assert done == ["cancel", "cancel", "work"]


@on_event_loop
async def test_a_cancellation_comes_first_and_the_error_of_the_work_is_its_cause() -> None:
    async def work() -> None:
        for _ in range(9):
            await asyncio.sleep(0)
        await fail()

    async def call() -> None:
        with pytest.raises(asyncio.CancelledError) as caught:
            await uninterrupted(work())
        assert isinstance(caught.value.__cause__, KeyError)

    await (await cancelled_twice(call()))


@on_event_loop
async def test_the_error_of_a_background_task_is_raised_once() -> None:
    background = BackgroundTask()
    await background.wait()
    background.start("fails", fail)
    assert background.is_running
    with pytest.raises(KeyError):
        await background.wait()
    await background.wait()
    assert not background.is_running


@on_event_loop
async def test_cancelling_a_wait_leaves_the_task_running_until_it_is_closed() -> None:
    background = BackgroundTask()
    task = background.start("waits", asyncio.Event().wait)  # type: ignore[arg-type]
    waiting = await cancelled_twice(background.wait())
    assert waiting.cancelled()
    assert background.is_running
    await background.close()
    assert task.cancelled()
    assert not background.is_running


async def wait_for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_of_several_gives_the_result_and_the_others_have_ended(fails: bool) -> None:
    ended: list[str] = []

    async def quick() -> int:
        await asyncio.sleep(0)
        if fails:
            raise KeyError("quick")
        return 3

    async def run() -> int:
        return await first_of(wait_for_ever(ended), quick())

    if fails:
        with pytest.raises(KeyError, match="quick"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == 3
    assert ended == ["work"]
