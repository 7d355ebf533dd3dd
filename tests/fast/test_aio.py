"""Deadlines and processes that stand still."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.virtual_clock import run_virtually
from torchtitan_rl.aio import deadline, wait_within


def stand_still(seconds: float) -> None:
    """Let the loop's clock jump, as that of a process that was stopped does."""
    asyncio.get_running_loop()._clock.now += seconds  # type: ignore[attr-defined]


def test_what_takes_longer_than_its_deadline_is_ended():
    async def work() -> float:
        with pytest.raises(TimeoutError):
            async with deadline(10.0):
                await asyncio.sleep(100.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(work()) == pytest.approx(10.0)


def test_time_in_which_the_process_stood_still_does_not_count():
    async def work() -> None:
        async with deadline(10.0) as limit:
            asyncio.get_running_loop().call_later(5.0, stand_still, 3_600.0)
            await asyncio.sleep(6.0)
            await asyncio.sleep(6.0)
        assert not limit.expired()

    run_virtually(work())


def test_a_wait_for_a_task_ends_with_it_or_after_its_time_without_that_of_standing_still():
    async def work() -> None:
        asyncio.get_running_loop().call_later(5.0, stand_still, 3_600.0)
        task = asyncio.ensure_future(asyncio.sleep(15.0))
        assert not await wait_within(3.0, task)
        assert await wait_within(10.0, task)

    run_virtually(work())


def test_a_loop_that_was_blocked_reads_the_answers_that_arrived_meanwhile():
    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, stand_still, 4.0)
        async with deadline(2.0) as limit:
            await asyncio.sleep(3.0)
        assert not limit.expired()
        loop.call_later(1.0, stand_still, 4.0)
        assert await wait_within(2.0, asyncio.ensure_future(asyncio.sleep(3.0)))

    run_virtually(work())


def test_after_it_was_blocked_the_rest_of_the_time_counts():
    async def work() -> float:
        asyncio.get_running_loop().call_later(1.0, stand_still, 4.0)
        with pytest.raises(TimeoutError):
            async with deadline(2.0):
                await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert run_virtually(work()) == pytest.approx(1.0 + 4.0 + 2.0)
