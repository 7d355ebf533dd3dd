"""Batches of messages: what leaves together, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from tests.support.virtual_clock import run_virtually
from torchtitan_rl.channel import Outbox


def now() -> float:
    return asyncio.get_running_loop().time()


def virtually(scenario: Callable[[Outbox[int]], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario(Outbox(interval_s=1.0))

    run_virtually(run())


def test_the_first_leaves_at_once_and_later_ones_together_after_the_interval() -> None:
    async def scenario(outbox: Outbox[int]) -> None:
        outbox.put(1)
        assert (await outbox.take(), now()) == ((1,), 0.0)
        outbox.put(2)
        taking = asyncio.create_task(outbox.take())
        await asyncio.sleep(0.4)
        outbox.put(3, 4)
        assert (await taking, now()) == ((2, 3, 4), 1.0)

    virtually(scenario)


def test_an_urgent_message_takes_those_before_it_along_at_once() -> None:
    async def scenario(outbox: Outbox[int]) -> None:
        outbox.put(1)
        await outbox.take()
        outbox.put(2)
        taking = asyncio.create_task(outbox.take())
        await asyncio.sleep(0.4)
        outbox.put(3, is_urgent=True)
        assert (await taking, now()) == ((2, 3), 0.4)

    virtually(scenario)


def test_what_many_threads_put_is_taken_once_and_in_the_order_of_each() -> None:
    outbox: Outbox[tuple[int, int]] = Outbox(interval_s=0.001)

    def put(thread: int) -> None:
        for number in range(500):
            outbox.put((thread, number), is_urgent=number % 7 == 0)

    async def take() -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        while len(taken) < 2000:
            taken += await outbox.take()
        return taken

    threads = [threading.Thread(target=put, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    taken = asyncio.run(asyncio.wait_for(take(), 60))
    for index in range(4):
        assert [number for thread, number in taken if thread == index] == list(range(500))
