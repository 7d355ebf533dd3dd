"""Condition variables of one event loop, cheap where many tasks wait for the same condition.

Invariants: a task is woken when its condition holds after a change, checks it again, and continues
in that iteration of the event loop where it still holds; tasks that share a key share one check per
change and are woken in the order in which they began to wait; simultaneous changes cause one check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

Condition = Callable[[], bool]


class _Wait:
    """The tasks that wait for one condition."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self.futures: dict[asyncio.Future[None], None] = {}

    def holds(self) -> bool:
        try:
            return self._condition()
        except Exception:
            return True  # each task checks again and raises it

    def wake(self) -> None:
        for future in self.futures:
            if not future.done():
                future.set_result(None)


class Wakeups:
    """The conditions that tasks wait for."""

    def __init__(self) -> None:
        self._waits: dict[Hashable, _Wait] = {}
        self._is_due = False

    def notify(self) -> None:
        """Something has changed: check all conditions once, in the next iteration."""
        if self._waits and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._check)

    async def until(self, condition: Condition, *, key: Hashable = None) -> None:
        """Return once ``condition`` holds; raise what it raises.

        Waits with the same ``key`` must have equal conditions.
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

    def _check(self) -> None:
        self._is_due = False
        for key, wait in list(self._waits.items()):
            if wait.holds():
                del self._waits[key]
                wait.wake()
