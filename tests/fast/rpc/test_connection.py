"""The two loops of a connection, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.virtual_clock import run_virtually
from torchtitan_rl.channel import Connection, ConnectionCancelledError


class Peer:
    """Its deliveries take a second; it tells what a test puts into ``news``."""

    def __init__(self) -> None:
        self.delivered: list[tuple[int, ...]] = []
        self.handled: list[str] = []
        self.news: asyncio.Queue[tuple[str, ...] | BaseException] = asyncio.Queue()
        self.error: BaseException | None = None
        self.connection: Connection[int, str] = Connection(
            "peer", deliver=self.deliver, poll=self.poll, handle=self.handle
        )

    async def deliver(self, messages: tuple[int, ...]) -> None:
        self.delivered.append(messages)
        await asyncio.sleep(1.0)
        if self.error is not None:
            raise self.error

    async def poll(self) -> tuple[str, ...]:
        news = await self.news.get()
        if isinstance(news, BaseException):
            raise news
        return news

    async def handle(self, messages: tuple[str, ...]) -> None:
        await asyncio.sleep(0.5)
        self.handled += messages


def virtually(scenario: Callable[[Peer, asyncio.Task[None]], Awaitable[None]]) -> None:
    async def run() -> None:
        peer = Peer()
        running = asyncio.create_task(peer.connection.run())
        await scenario(peer, running)
        running.cancel()
        await asyncio.wait({running})
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(run())


def test_one_delivery_runs_at_a_time_and_the_next_takes_all_that_came_meanwhile() -> None:
    async def scenario(peer: Peer, running: asyncio.Task[None]) -> None:
        peer.connection.put(1)
        await asyncio.sleep(0.5)
        peer.connection.put(2)
        peer.connection.put(3)
        assert peer.delivered == [(1,)]
        await peer.connection.arrived()
        assert peer.delivered == [(1,), (2, 3)]
        assert asyncio.get_running_loop().time() == 2.0

    virtually(scenario)


def test_batches_are_handled_one_after_the_other() -> None:
    async def scenario(peer: Peer, running: asyncio.Task[None]) -> None:
        peer.news.put_nowait(("a", "b"))
        peer.news.put_nowait(("c",))
        await asyncio.sleep(0.6)
        assert peer.handled == ["a", "b"]
        await asyncio.sleep(0.5)
        assert peer.handled == ["a", "b", "c"]

    virtually(scenario)


@pytest.mark.parametrize("where", ["delivery", "poll"])
@pytest.mark.parametrize("error", [OSError("broken"), asyncio.CancelledError()])
def test_a_loop_that_ends_ends_the_connection_and_every_wait(
    where: str, error: BaseException
) -> None:
    async def scenario(peer: Peer, running: asyncio.Task[None]) -> None:
        peer.connection.put(1)
        await asyncio.sleep(0.5)
        peer.connection.put(2)
        arriving = asyncio.create_task(peer.connection.arrived())
        if where == "delivery":
            peer.error = error
        else:
            peer.news.put_nowait(error)
        is_cancelled = isinstance(error, asyncio.CancelledError)
        expected = ConnectionCancelledError if is_cancelled else OSError
        with pytest.raises(expected, match=f"peer {where}" if is_cancelled else "broken"):
            await running
        await arriving
        assert peer.connection.unsent() == (2,)

    virtually(scenario)


def test_a_wait_for_a_delivery_that_begins_after_the_end_returns_at_once() -> None:
    async def scenario(peer: Peer, running: asyncio.Task[None]) -> None:
        peer.news.put_nowait(OSError("broken"))
        with pytest.raises(OSError, match="broken"):
            await running
        peer.connection.put(1)
        async with asyncio.timeout(1.0):
            await peer.connection.arrived()
        assert peer.connection.unsent() == (1,)

    virtually(scenario)
