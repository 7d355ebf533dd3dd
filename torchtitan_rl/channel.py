"""The messages between the controller and its actors, and how they are gathered into batches, which
`backends.monarch.runtime.ActorChannel` transports. Calls and aborts go in one direction, and ends
of calls in the other; `generation.server` and `serving.link` add their own messages.

Invariants of `Outbox`: each message leaves once, in the order of `Outbox.put`. At most one batch
leaves per interval, unless an urgent message waits. When no batch left during the last interval,
the next message leaves at once. The event loop is woken at most twice per batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

M = TypeVar("M")


class Outbox(Generic[M]):
    """A queue into which many threads put messages, and from which one task takes them in batches,
    at least ``interval_s`` apart."""

    def __init__(self, *, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0  # when the next batch may leave, in the event loop's time
        self._lock = threading.Lock()  # guards all below
        self._messages: list[M] = []
        self._is_due = self._is_urgent = False
        self._failure: Exception | None = None
        self._is_awaited: Callable[[], bool] = bool  # what `take` waits for, and how to wake it
        self._wake: Callable[[], object] | None = None

    def put(self, *messages: M, is_urgent: bool = False) -> None:
        """Queue messages; any thread may call this.

        An urgent message, and all messages before it, leave without waiting for the interval. A
        call without messages also wakes `take`, whose batch may then be empty.
        """
        with self._lock:
            self._messages += messages
            self._is_due = True
            self._is_urgent |= is_urgent
            if self._wake is not None:
                self._notify()

    def discard(self, is_discarded: Callable[[M], bool]) -> bool:
        """Drop the matching messages that have not left. Returns whether there were any."""
        with self._lock:
            num_before = len(self._messages)
            self._messages = [one for one in self._messages if not is_discarded(one)]
            return len(self._messages) < num_before

    def fail(self, error: Exception) -> None:
        """Make every `take` raise ``error``, including one that waits now."""
        with self._lock:
            self._failure = error
            self._notify()

    def take_now(self) -> tuple[M, ...]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            messages, self._messages = tuple(self._messages), []
            self._is_due = self._is_urgent = False
            return messages

    async def take(self, timeout_s: float | None = None) -> tuple[M, ...]:
        """Wait until the next batch may leave, and return it. Only one call at a time.

        The batch is empty if no message was put within ``timeout_s``, or if all were discarded.
        """
        now = asyncio.get_running_loop().time
        if await self._wait_until(lambda: self._is_due, timeout_s):
            await self._wait_until(lambda: self._is_urgent, self._next_s - now())
        self._next_s = now() + self._interval_s
        return self.take_now()

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for ``condition`` or a failure; False if neither came in time."""
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


P = TypeVar("P")
R = TypeVar("R")
E = TypeVar("E")

CallId = str | int
"""Unique among the running calls: the request's id for a request, a number for any other call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[P]):
    """Work that the other side is asked to do: a request or a command. It has exactly one `End`.

    ``streams``: a request's progress is reported within milliseconds. Otherwise a replica reports
    it to the controller about once a second, and the controller does not report it to the endpoint.

    ``run``: of a client's call, the HTTP request's run; see `serving.retries`. Empty if the request
    cannot be repeated.
    """

    call_id: CallId
    payload: P
    streams: bool = False
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End the call now. Ids of unknown and ended calls are ignored."""

    call_id: CallId


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Generic[R, E]):
    call_id: CallId
    result: R | None = None
    error: E | None = None
