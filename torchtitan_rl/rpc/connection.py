"""An event loop's end of a connection to an actor: many messages in few calls.

The actor has two calls: ``deliver`` takes a batch of messages, ``poll`` returns a batch as soon as
it has messages. It gathers them in an `Outbox`, too.

Invariants: one delivery and one poll run at a time, and messages arrive in order; messages that are
put while a delivery runs leave together with the next one; batches that arrive are handled one
after the other. The end of either loop ends the connection, with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Generic, NoReturn, TypeVar

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.rpc.outbox import Outbox
from torchtitan_rl.tasks import cancel_all

Out = TypeVar("Out")
In = TypeVar("In")


class ConnectionCancelledError(TorchtitanRLError):
    """A loop of the connection was cancelled, and not by the connection itself."""


class Connection(Generic[Out, In]):
    """``handle`` takes each batch that arrives. ``interval_s`` lies between two deliveries."""

    def __init__(
        self,
        name: str,
        *,
        deliver: Callable[[tuple[Out, ...]], Awaitable[None]],
        poll: Callable[[], Awaitable[tuple[In, ...]]],
        handle: Callable[[tuple[In, ...]], Awaitable[None]],
        interval_s: float = 0.0,
    ) -> None:
        self._name = name
        self._deliver = deliver
        self._poll = poll
        self._handle = handle
        self._outbox: Outbox[Out] = Outbox(interval_s=interval_s)
        self._arrival: asyncio.Future[None] | None = None  # of the next batch
        self._has_ended = False

    def put(self, *messages: Out, is_urgent: bool = False) -> None:
        """Have them delivered with the next batch; see `Outbox.put`."""
        self._outbox.put(*messages, is_urgent=is_urgent)

    def discard(self, is_discarded: Callable[[Out], bool]) -> bool:
        """Drop messages that have not left; True where there were any."""
        return self._outbox.discard(is_discarded)

    def unsent(self) -> tuple[Out, ...]:
        """Take the messages that have not left."""
        return self._outbox.take_now()

    async def arrived(self) -> None:
        """Return when the messages that are waiting now were delivered, or at once where the
        connection has ended and delivers nothing more."""
        if self._has_ended:
            return
        if self._arrival is None:
            self._arrival = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._arrival)

    async def run(self, **others: Coroutine[Any, Any, None]) -> NoReturn:
        """Deliver and poll until one of the two fails or this is cancelled. ``others`` run, and
        end, with them.

        Raises:
            Exception: raised by the actor's calls, ``handle`` or one of ``others``.
            ConnectionCancelledError: a loop was cancelled, and not by this method.
        """
        loops = [
            asyncio.create_task(self._send_all(), name=f"{self._name} delivery"),
            asyncio.create_task(self._receive_all(), name=f"{self._name} poll"),
            *(asyncio.create_task(one, name=f"{self._name} {key}") for key, one in others.items()),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            raise _failure(done)
        finally:
            await cancel_all(loops)
            self._has_ended = True
            _set(self._arrival)

    async def _send_all(self) -> None:
        while True:
            messages = await self._outbox.take()
            arrival, self._arrival = self._arrival, None
            try:
                await self._deliver(messages)
            finally:
                _set(arrival)

    async def _receive_all(self) -> None:
        while True:
            await self._handle(await self._poll())


def _set(arrival: asyncio.Future[None] | None) -> None:
    if arrival is not None and not arrival.done():
        arrival.set_result(None)


def _failure(ended: Collection[asyncio.Task[None]]) -> BaseException:
    """The error that ended loops, which never return."""
    for loop in ended:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            return error
    names = ", ".join(loop.get_name() for loop in ended)
    return ConnectionCancelledError(f"cancelled from within: {names}")
