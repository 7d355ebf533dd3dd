"""Keeping a process on some of the machine's CPU cores."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def stay_on_cores(cores: tuple[int, ...]) -> None:
    """Run all threads of this process, and those it starts later, on ``cores``; () changes nothing.

    Processes that it starts inherit this until they choose for themselves.
    """
    if not cores:
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
