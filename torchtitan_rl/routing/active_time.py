"""A clock that stands still while work is paused, and deadlines on it.

Invariant: a deadline passes only after so many seconds in which the clock ran, however often and
for how long it was paused in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager


class ActiveTime:
    """Seconds of the event loop's clock, less all that passed between `pause` and `resume`.

    ::

        async with active_time.timeout(60.0):  # raises TimeoutError after 60 s that count
            await work()
    """

    def __init__(self) -> None:
        self._paused_since_s: float | None = None
        self._paused_s = 0.0  # in pauses that are over
        self._timeouts: dict[asyncio.Timeout, float] = {}  # deadlines of those that run

    @property
    def is_paused(self) -> bool:
        return self._paused_since_s is not None

    def now_s(self) -> float:
        """Active seconds; only differences mean something."""
        return self._loop_s() - self.paused_s()

    def paused_s(self) -> float:
        """All seconds that did not count so far."""
        since_s = self._paused_since_s
        return self._paused_s + (0.0 if since_s is None else self._loop_s() - since_s)

    def pause(self) -> None:
        """Stop the clock; nothing happens where it is stopped."""
        if self._paused_since_s is not None:
            return
        self._paused_since_s = self._loop_s()
        self._reschedule()

    def resume(self) -> None:
        """Let the clock go on; nothing happens where it runs."""
        if self._paused_since_s is None:
            return
        self._paused_s = self.paused_s()
        self._paused_since_s = None
        self._reschedule()

    def timeout(self, delay_s: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """`timeout_at` so many active seconds from now."""
        return self.timeout_at(self.now_s() + delay_s)

    @asynccontextmanager
    async def timeout_at(self, deadline_s: float) -> AsyncIterator[asyncio.Timeout]:
        """As `asyncio.timeout_at`, on this clock: raises TimeoutError."""
        async with asyncio.timeout_at(self._when(deadline_s)) as timeout:
            self._timeouts[timeout] = deadline_s
            try:
                yield timeout
            finally:
                del self._timeouts[timeout]

    def _when(self, deadline_s: float) -> float | None:
        """In the event loop's time; None while the clock stands still."""
        return None if self.is_paused else deadline_s + self._paused_s

    def _reschedule(self) -> None:
        for timeout, deadline_s in self._timeouts.items():
            if not timeout.expired():
                timeout.reschedule(self._when(deadline_s))

    @staticmethod
    def _loop_s() -> float:
        return asyncio.get_running_loop().time()
