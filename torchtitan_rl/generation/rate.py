"""Tokens per second between two readings of a counter."""

from __future__ import annotations

import time

MIN_WINDOW_S = 0.05  # a reading sooner than this repeats the last rate


class ReadingRate:
    """Keeps the counter and the time of the previous reading."""

    def __init__(self) -> None:
        self._time_s = time.monotonic()
        self._count = 0
        self._rate = 0.0

    def read(self, count: int) -> float:
        now_s = time.monotonic()
        if now_s - self._time_s >= MIN_WINDOW_S:
            self._rate = (count - self._count) / (now_s - self._time_s)
            self._time_s, self._count = now_s, count
        return self._rate
