"""The messages between the controller and its actors, gathered into batches.

The messages are calls and aborts in one direction, and ends in the other. The replicas' channel and
the endpoint's connection define their own payloads, and further messages such as progress.

`Outbox`: each message leaves once, in the order of `Outbox.put`; at most one batch leaves per
interval, unless an urgent message waits; after a silence the first message leaves at once; the
event loop is woken at most twice for a batch of any size.

`Connection`: an event loop's end of a connection to an actor with two calls. ``deliver`` takes a
batch of messages; ``poll`` returns a batch as soon as it has messages. One delivery and one poll
run at a time, and messages arrive in order. Messages that are put while a delivery runs leave
together with the next one. Batches that arrive are handled one after the other. The end of either
loop ends the connection, with an error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from torchtitan_rl.aio import cancel_all
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.types import GenerationRequest

M = TypeVar("M")


class Outbox(Generic[M]):
    """Many threads put messages, one task takes them. ``interval_s``: between two batches."""

    def __init__(self, *, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0  # when the next batch may leave, in the event loop's time
        self._lock = threading.Lock()  # guards all below
        self._messages: list[M] = []
        self._is_due = self._is_urgent = False
        self._failure: Exception | None = None
        self._is_awaited: Callable[[], bool] = bool  # the taker's condition, and its wake-up
        self._wake: Callable[[], object] | None = None

    def put(self, *messages: M, is_urgent: bool = False) -> None:
        """From any thread. Urgent messages, and all before them, wait for no interval."""
        with self._lock:
            self._messages += messages
            self._is_due = True
            self._is_urgent |= is_urgent
            if self._wake is not None:
                self._notify()

    def discard(self, is_discarded: Callable[[M], bool]) -> bool:
        """Drop messages that have not left; whether there were any."""
        with self._lock:
            num_before = len(self._messages)
            self._messages = [one for one in self._messages if not is_discarded(one)]
            return len(self._messages) < num_before

    def fail(self, error: Exception) -> None:
        """Make every `take` raise ``error``, one that waits now included."""
        with self._lock:
            self._failure = error
            self._notify()

    def take_now(self) -> tuple[M, ...]:
        """Take all messages; an empty tuple if there are none."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            messages, self._messages = tuple(self._messages), []
            self._is_due = self._is_urgent = False
            return messages

    async def take(self, timeout_s: float | None = None) -> tuple[M, ...]:
        """The next batch, as soon as it may leave; empty if no message was put within
        ``timeout_s``, or all were discarded. One call at a time."""
        now = asyncio.get_running_loop().time
        if await self._wait_until(lambda: self._is_due, timeout_s):
            await self._wait_until(lambda: self._is_urgent, self._next_s - now())
        self._next_s = now() + self._interval_s
        return self.take_now()

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Whether ``condition`` holds in time."""
        reached = asyncio.Event()
        with self._lock:
            if condition() or self._failure is not None:
                return True
            if timeout_s is not None and timeout_s <= 0:
                return False
            self._is_awaited = condition
            self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, reached.set)
        try:
            async with asyncio.timeout(timeout_s):
                await reached.wait()
                return True
        except TimeoutError:
            return False
        finally:
            with self._lock:
                self._wake = None

    def _notify(self) -> None:
        if self._wake is not None and (self._is_awaited() or self._failure is not None):
            wake, self._wake = self._wake, None
            wake()


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


P = TypeVar("P")
R = TypeVar("R")
E = TypeVar("E")

CallId = str | int
"""Unique among the calls that run: requests have their own ids, everything else a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[P]):
    """A request for work that ends once."""

    call_id: CallId
    payload: P


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The payload of a call that completes a request. ``streams``: its progress is reported within
    milliseconds; else a replica reports it about every second, and the controller never."""

    request: GenerationRequest
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End the call now. Unknown and ended ids are ignored."""

    call_id: CallId


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Generic[R, E]):
    """The end of one call: a result, or an error."""

    call_id: CallId
    result: R | None = None
    error: E | None = None
