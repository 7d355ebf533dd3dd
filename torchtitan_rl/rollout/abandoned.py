"""Calls of user code that run on after their time-out or cancellation.

A thread cannot be killed, and a task may ignore its cancellation: both keep all that they hold. A
few do no harm; their number is logged whenever it doubles. If too many hang for long, no
environment is called any more except to be closed, and the run fails with an error that names them.

Invariant: a call is counted once, from the moment its caller stops waiting until it ends.
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
HANGS_AFTER_S = 60.0  # since its caller stopped waiting; until then it may only be slow to notice


class HangingCallsError(TorchtitanRLError):
    """Too many calls of environments, rewards or agents hang; the message names them."""


class AbandonedCalls:
    """The abandoned calls of one process. May be used from any thread."""

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
        self._running: dict[object, tuple[str, float]] = {}  # name, abandoned at
        self._next_report = 1

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, call: object, name: str) -> None:
        """The caller of ``call`` no longer waits for it."""
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
        """The call has ended; ignored if it was not abandoned."""
        with self._lock:
            self._running.pop(call, None)

    def names(self) -> str:
        """The most frequent functions and their numbers of calls, in one line."""
        with self._lock:
            counts = Counter(name for name, _ in self._running.values())
        return ", ".join(f"{name}: {number}" for name, number in counts.most_common(5))

    def require_few(self) -> None:
        """
        Raises:
            HangingCallsError: too many have hung for long.
        """
        if len(self._running) < self._max_hanging:
            return
        latest = self._clock() - self._hangs_after_s
        with self._lock:
            hanging = sum(since <= latest for _, since in self._running.values())
        if hanging >= self._max_hanging:
            raise HangingCallsError(
                f"{hanging} calls have hung for {self._hangs_after_s:.0f} s or more after their "
                f"time-out ({self.names()}), and each keeps its thread: give what they wait for a "
                "time-out of its own"
            )


abandoned = AbandonedCalls()
"""The instance of this process."""
