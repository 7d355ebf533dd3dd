"""A clock that stops while work is paused, and waits for a condition, on one event loop.

Invariants
- A deadline passes only after the clock has run for its number of seconds; neither pauses count nor
  time in which this process was stopped (see `aio.py`).
- A task is woken when its condition holds after a change. It checks again and, if it still holds,
  continues in the same iteration of the event loop. Tasks with the same key share one check per
  change, and are woken in the order in which they began to wait, at most 128 in 50 ms: more would
  hold up the event loop. Simultaneous changes cause one check.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from torchtitan_rl.aio import STOOD_STILL_S, loop_s


@dataclass(slots=True, eq=False)
class _Deadline:
    """The deadline of a `timeout_at` block that is running."""

    limit: asyncio.Timeout
    deadline_s: float  # in active seconds
    timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class ActiveTime:
    """The seconds of the event loop's clock, without those between `pause` and `resume`.

    ::

        async with active_time.timeout(60.0):  # raises TimeoutError after 60 s that count
            await work()
    """

    def __init__(self) -> None:
        self._paused_since_s: float | None = None
        self._paused_s = 0.0  # length of all ended pauses
        self._deadlines: dict[_Deadline, None] = {}

    @property
    def is_paused(self) -> bool:
        return self._paused_since_s is not None

    def now_s(self) -> float:
        """Return active seconds; only differences are meaningful."""
        return loop_s() - self.paused_s()

    def paused_s(self) -> float:
        """Return the total length of all pauses so far."""
        since_s = self._paused_since_s
        return self._paused_s + (0.0 if since_s is None else loop_s() - since_s)

    def pause(self) -> None:
        if self._paused_since_s is None:
            self._paused_since_s = loop_s()
            self._reschedule()

    def resume(self) -> None:
        if self._paused_since_s is not None:
            self._paused_s, self._paused_since_s = self.paused_s(), None
            self._reschedule()

    def timeout(self, delay_s: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Like `timeout_at`, with a deadline ``delay_s`` active seconds from now."""
        return self.timeout_at(self.now_s() + delay_s)

    @asynccontextmanager
    async def timeout_at(self, deadline_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Like `asyncio.timeout_at`, on this clock."""
        async with asyncio.timeout(None) as limit:
            one = _Deadline(limit, deadline_s)
            self._deadlines[one] = None
            self._schedule(one)
            try:
                yield limit
            finally:
                del self._deadlines[one]
                one.cancel()

    def _schedule(self, one: _Deadline) -> None:
        """Set the timer for the deadline; while the clock is stopped there is no timer."""
        one.cancel()
        if not self.is_paused:
            due_s = one.deadline_s + self._paused_s
            loop = asyncio.get_running_loop()
            one.timer = loop.call_at(due_s, self._on_due, one, due_s)

    def _on_due(self, one: _Deadline, due_s: float) -> None:
        late_s = loop_s() - due_s
        if late_s > STOOD_STILL_S:
            # The process was suspended: credit that time, and handle pending answers first.
            self._paused_s += late_s + STOOD_STILL_S
            self._reschedule()
        else:
            one.limit.reschedule(loop_s())

    def _reschedule(self) -> None:
        for one in self._deadlines:
            if not one.limit.expired():
                self._schedule(one)


Condition = Callable[[], bool]

_WOKEN_AT_ONCE = 128  # tasks of one condition: requests, each of which takes the loop about 0.3 ms
_REST_S = 0.05


class _Wait:
    """The tasks that wait for one condition."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self.futures: dict[asyncio.Future[None], None] = {}
        self.rests_until_s = 0.0  # on the loop's clock

    def holds(self) -> bool:
        try:
            return self._condition()
        except Exception:
            return True  # each task checks again, and then raises the error itself

    def wake(self) -> bool:
        """Wake some tasks; False if there are more."""
        waiting = [future for future in self.futures if not future.done()]
        for future in waiting[:_WOKEN_AT_ONCE]:
            future.set_result(None)
        return len(waiting) <= _WOKEN_AT_ONCE


class Wakeups:
    """The conditions that tasks wait for. Many tasks that wait for the same condition are cheap."""

    def __init__(self) -> None:
        self._waits: dict[Hashable, _Wait] = {}
        self._is_due = False

    def notify(self) -> None:
        """Check all conditions once, in the next iteration of the event loop."""
        if self._waits and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._check)

    async def until(self, condition: Condition, *, key: Hashable = None) -> None:
        """Return once ``condition`` holds; its exception is raised here. Waits with the same
        ``key`` must have equal conditions."""
        key = object() if key is None else key
        while not condition():
            await self.once(condition, key, asyncio.get_running_loop().create_future())

    async def once(self, condition: Condition, key: Hashable, future: asyncio.Future[None]) -> None:
        """Return after a change at which ``condition`` held, or once ``future`` is done."""
        wait = self._waits.setdefault(key, _Wait(condition))
        wait.futures[future] = None
        try:
            await future
        finally:
            del wait.futures[future]
            if not wait.futures and self._waits.get(key) is wait:
                del self._waits[key]

    def _check(self) -> None:
        self._is_due = False
        loop = asyncio.get_running_loop()
        for key, wait in list(self._waits.items()):
            if wait.rests_until_s > loop.time() or not wait.holds():
                continue
            if wait.wake():
                del self._waits[key]
            else:
                wait.rests_until_s = loop.time() + _REST_S
                loop.call_at(wait.rests_until_s, self.notify)
