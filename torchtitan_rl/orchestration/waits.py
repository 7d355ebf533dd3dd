"""Named waits: what each loop waits for at a moment, since when, and how long it may take.

Invariants: a wait is listed exactly while its ``with`` block is open, whatever ends that; a wait
says what it waits for in words that need no other context ("trainer waits for a full batch").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One open wait. ``since_s`` is on the clock of its `Waits`."""

    name: str
    since_s: float
    limit_s: float | None  # None: only the watchdog's own limit holds
    details: Callable[[], str] | None  # asked when somebody looks, not before

    def describe(self, now_s: float) -> str:
        """``trainer waits for a full batch (90 s): 3 of 16 groups finished``"""
        text = f"{self.name} ({now_s - self.since_s:.0f} s)"
        details = self.details() if self.details is not None else ""
        return f"{text}: {details}" if details else text

    def is_overdue(self, now_s: float) -> bool:
        return self.limit_s is not None and now_s - self.since_s > self.limit_s


class Waits:
    """The waits of one event loop. ``clock`` replaces the loop's own in tests."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        self._open: list[Wait] = []

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()

    @contextmanager
    def on(
        self,
        name: str,
        *,
        details: Callable[[], str] | None = None,
        limit_s: float | None = None,
    ) -> Iterator[None]:
        """Mark that somebody waits while the block is open.

        Args:
            limit_s: how long this wait may take: as long as it is within it, the watchdog does not
                end the run; beyond it, it does. Where the one who waits has a time-out of its own,
                give somewhat more than that.
        """
        wait = Wait(name=name, since_s=self.now_s(), limit_s=limit_s, details=details)
        self._open.append(wait)
        try:
            yield
        finally:
            self._open.remove(wait)

    def open(self) -> tuple[Wait, ...]:
        """The longest first."""
        return tuple(self._open)
