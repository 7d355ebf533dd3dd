"""Waits for something to change, cheap where many wait for the same thing.

Invariants: who waits looks again whenever its condition held after a change, and runs on without a
break once it holds then; those who share a key share one look per change, however many they are,
and are woken in the order in which they began to wait; changes that come together are one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

Condition = Callable[[], bool]


class _Wait:
    """Those who wait for one condition."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self.futures: dict[asyncio.Future[None], None] = {}

    def holds(self) -> bool:
        try:
            return self._condition()
        except Exception:
            return True  # each who waits looks for itself, and raises it

    def wake(self) -> None:
        for future in self.futures:
            if not future.done():
                future.set_result(None)


class Wakeups:
    """``num_looks`` and ``num_wakes`` count the work that was done, for tests."""

    def __init__(self) -> None:
        self._waits: dict[Hashable, _Wait] = {}
        self._is_due = False
        self.num_looks = 0
        self.num_wakes = 0

    def notify(self) -> None:
        """Something has changed: conditions are looked at again, soon and once."""
        if self._waits and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    async def until(self, condition: Condition, *, key: Hashable = None) -> None:
        """Return once ``condition`` holds; raise what it raises.

        Those who give the same ``key`` must wait for the same thing.
        """
        key = object() if key is None else key
        while not condition():
            await self.once(condition, key, asyncio.get_running_loop().create_future())

    async def once(self, condition: Condition, key: Hashable, future: asyncio.Future[None]) -> None:
        """Return after a change with which ``condition`` held, or once ``future`` is done."""
        wait = self._waits.setdefault(key, _Wait(condition))
        wait.futures[future] = None
        try:
            await future
        finally:
            del wait.futures[future]
            if not wait.futures and self._waits.get(key) is wait:
                del self._waits[key]

    def _look(self) -> None:
        self._is_due = False
        for key, wait in list(self._waits.items()):
            self.num_looks += 1
            if wait.holds():
                self.num_wakes += len(wait.futures)
                del self._waits[key]
                wait.wake()
