"""The messages between the controller and its actors, and how they are gathered into batches.

The messages are calls and aborts in one direction, and ends in the other; `generation.server` and
`serving.link` add their own. `backends.monarch.channel` carries the batches.

`Outbox`: each message leaves once, in the order of `Outbox.put`; at most one batch leaves per
interval, unless an urgent message waits; after a silence the first message leaves at once; the
event loop is woken at most twice for a batch of any size.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

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
        """From any thread. Urgent messages, and all before them, wait for no interval. Without
        messages the next batch may be empty."""
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
