import asyncio

import pytest

from torchtitan_rl.observability.engine_sampler import background


async def wait_for_ever(started: asyncio.Event, ended: list[str]) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


def test_work_runs_while_the_block_is_open_and_has_ended_behind_it() -> None:
    async def run() -> list[str]:
        started, ended = asyncio.Event(), list[str]()
        async with background(wait_for_ever(started, ended), name="work"):
            await started.wait()
            assert ended == []
        return ended

    assert asyncio.run(run()) == ["work"]


def test_an_error_of_the_work_is_raised_at_the_end_of_the_block() -> None:
    async def fail() -> None:
        raise KeyError("work")

    async def run() -> None:
        async with background(fail(), name="work"):
            await asyncio.sleep(0)

    with pytest.raises(KeyError, match="work"):
        asyncio.run(run())


def test_an_error_of_the_block_ends_the_work_and_is_the_one_that_is_raised() -> None:
    ended: list[str] = []

    async def run() -> None:
        started = asyncio.Event()
        async with background(wait_for_ever(started, ended), name="work"):
            await started.wait()
            raise ValueError("block")

    with pytest.raises(ValueError, match="block"):
        asyncio.run(run())
    assert ended == ["work"]
