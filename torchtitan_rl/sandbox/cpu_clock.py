"""CPU time of a process's descendants, those included that nobody waits for."""

from __future__ import annotations

import os
import struct
import time

from torchtitan_rl.sandbox import kernel


class CpuClock:
    """Counts from its start on, by a counter of the kernel that new processes inherit.

    Where the kernel allows no counters (``kernel.perf_event_paranoid`` of 3, or a container that
    refuses `perf_event_open`) it counts nothing.
    """

    def __init__(self) -> None:
        self._started_s = time.process_time()
        try:
            self._counter: int | None = kernel.open_task_clock()
        except OSError:
            self._counter = None

    def read_s(self) -> float:
        """CPU seconds of what this process has started, without its own."""
        if self._counter is None:
            return 0.0
        (nanoseconds,) = struct.unpack("Q", os.read(self._counter, 8))
        return float(nanoseconds) / 1e9 - (time.process_time() - self._started_s)
