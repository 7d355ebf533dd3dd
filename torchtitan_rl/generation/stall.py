"""Decides whether an engine loop is stuck: from its progress, not from its process's answers.

Pure: no clock, no thread.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """An engine loop's progress. ``count`` grows with sampled tokens, requests that end by
    themselves, and decisions other than STEP; not with calls of its methods.

    ``is_busy``: it has requests to step, and is not stopped by a pause, a swap or a sleep.
    """

    count: int
    is_busy: bool


class StallWatch:
    """``timeout_s``: without progress for so long a busy loop is stuck."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pulse = Pulse(count=0, is_busy=False)
        self._since_s = 0.0

    def stalled_s(self, pulse: Pulse, now_s: float) -> float:
        """Observed seconds in which the loop was busy without progress."""
        if not pulse.is_busy or pulse != self._pulse:
            self._pulse, self._since_s = pulse, now_s
        return now_s - self._since_s

    def is_stuck(self, pulse: Pulse, now_s: float) -> bool:
        return self.stalled_s(pulse, now_s) >= self.timeout_s
