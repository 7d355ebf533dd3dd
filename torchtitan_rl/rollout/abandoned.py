"""Calls of others' code that run on after their caller gave them up.

A thread cannot be killed, and a task may ignore its cancellation: after a time-out both run on, and
keep all that they hold. A few do no harm. Their number is logged whenever it doubles. Where too
many have hung for long, the run fails by an error that names them: environments are called no more,
but to be closed.

Invariant: a call is counted from the moment in which it is given up to its end, once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from torchtitan_rl.errors import TorchtitanRLError

logger = logging.getLogger(__name__)

MAX_HANGING = 256
HANGS_AFTER_S = 60.0  # from the moment it was given up; before, it may only be slow to notice


class HangingCallsError(TorchtitanRLError):
    """Calls of the environment, the rewards or the agents hang; it names them."""


class AbandonedCalls:
    """All of one process, from any thread."""

    def __init__(
        self,
        *,
        max_hanging: int = MAX_HANGING,
        hangs_after_s: float = HANGS_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_hanging = max_hanging
        self._hangs_after_s = hangs_after_s
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[object, tuple[str, float]] = {}  # oldest first: name, given up at
        self._next_report = 1

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, call: object, name: str) -> None:
        """``call`` was given up while it runs."""
        with self._lock:
            self._running[call] = (name, self._clock())
            number = len(self._running)
            is_reported = number >= self._next_report
            if is_reported:
                self._next_report = 2 * number
        if is_reported:
            logger.warning(
                "%d calls run on after their time-out or cancellation (%s)", number, self.names()
            )

    def end(self, call: object) -> None:
        """It has ended; nothing happens where it was never given up."""
        with self._lock:
            self._running.pop(call, None)

    def names(self) -> str:
        """Which ones run, and how often each, in one line."""
        with self._lock:
            counts = Counter(name for name, _ in self._running.values())
        return ", ".join(f"{name}: {number}" for name, number in counts.most_common(5))

    def require_few(self) -> None:
        """
        Raises:
            HangingCallsError: too many have hung for long.
        """
        with self._lock:
            given_up_at = [since for _, since in self._running.values()]
        if len(given_up_at) < self._max_hanging:
            return
        now = self._clock()
        hanging = sum(now - since >= self._hangs_after_s for since in given_up_at)
        if hanging >= self._max_hanging:
            raise HangingCallsError(
                f"{hanging} calls hang {self._hangs_after_s:.0f} s and more after they were given "
                f"up ({self.names()}), and each keeps its thread: give what they wait for a "
                "time-out of its own"
            )


abandoned = AbandonedCalls()
"""Those of this process."""
