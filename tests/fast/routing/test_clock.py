"""The clock that stands still while work is paused."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.async_tests import on_virtual_clock
from torchtitan_rl.routing.clock import ActiveTime


@on_virtual_clock
async def test_paused_time_does_not_count_and_pauses_do_not_nest() -> None:
    clock = ActiveTime()
    start_s = clock.now_s()
    await asyncio.sleep(3)
    clock.pause()
    await asyncio.sleep(5)
    clock.pause()
    assert clock.is_paused
    assert (clock.now_s() - start_s, clock.paused_s()) == (3, 5)
    clock.resume()
    clock.resume()
    await asyncio.sleep(4)
    assert (clock.now_s() - start_s, clock.paused_s()) == (7, 5)


@pytest.mark.parametrize("begins_paused", [True, False])
@on_virtual_clock
async def test_a_deadline_passes_after_so_many_active_seconds(begins_paused: bool) -> None:
    clock, now = ActiveTime(), asyncio.get_running_loop().time
    if begins_paused:
        clock.pause()

    async def switch() -> None:
        for seconds in (1, 2, 4, 8):
            await asyncio.sleep(seconds)
            clock.pause()
            await asyncio.sleep(100)
            clock.resume()

    switching = asyncio.create_task(switch())
    with pytest.raises(TimeoutError):
        async with clock.timeout(10.0):
            await asyncio.sleep(10_000)
    # 1, 2 and 4 s with 100 s of pause behind each; then 3 more. Or 2, 4, and then 4 more.
    assert now() == pytest.approx(311 if begins_paused else 310)
    switching.cancel()


@on_virtual_clock
async def test_time_in_which_the_process_stood_still_does_not_count():
    clock, loop = ActiveTime(), asyncio.get_running_loop()

    def stand_still() -> None:
        loop._clock.now += 3_600.0  # type: ignore[attr-defined]

    async with clock.timeout(10.0) as limit:
        loop.call_later(5.0, stand_still)
        await asyncio.sleep(8.0)
        await asyncio.sleep(4.0)
    assert not limit.expired()
    with pytest.raises(TimeoutError):
        async with clock.timeout(10.0):
            await asyncio.sleep(12.0)
