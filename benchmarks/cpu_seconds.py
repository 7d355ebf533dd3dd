"""CPU seconds that each process of a run spends on one optimizer step.

The processes of a run are gone when the run ends. So their times are read while the run continues,
whenever a step has been written to ``metrics.jsonl``.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import psutil


def per_step(after: Mapping[int, Mapping[str, float]], first: int, last: int) -> dict[str, float]:
    """The mean CPU seconds of each process in a step, over the steps from ``first`` to ``last``.
    The result is empty if the times at the beginning and the end of these steps were not read.

    In ``{2: {"trainer": 10.0}, 4: {"trainer": 13.0}}`` the steps 3 and 4 took 1.5 s each.
    """
    if first > last or first - 1 not in after or last not in after:
        return {}
    start, end = after[first - 1], after[last]
    both = sorted(start.keys() & end.keys())
    return {name: (end[name] - start[name]) / (last - first + 1) for name in both}


class CpuSeconds:
    """Measures the processes of the run of process ``pid``. Call `look` often during the run; a
    call costs little."""

    def __init__(self, pid: int, metrics: Path) -> None:
        self._root = psutil.Process(pid)
        self._metrics = metrics
        self._num_bytes = 0
        self._processes: list[tuple[str, psutil.Process]] = []
        self.after: dict[int, Mapping[str, float]] = {}  # by step: seconds of each process so far

    def look(self) -> None:
        """Read the processes' times if another line has been written."""
        with contextlib.suppress(FileNotFoundError):
            num_bytes = self._metrics.stat().st_size
            if num_bytes != self._num_bytes:
                self._num_bytes = num_bytes
                self.after[_last_step(self._metrics)] = self._read()

    def _read(self) -> dict[str, float]:
        with contextlib.suppress(psutil.Error):
            # All processes exist before the first step ends; looking for them costs milliseconds.
            self._processes = self._processes or _processes_of(self._root)
        seconds: defaultdict[str, float] = defaultdict(float)
        for name, process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds[name] += times.user + times.system
        return seconds


def _processes_of(root: psutil.Process) -> list[tuple[str, psutil.Process]]:
    """The processes of a run, each with the name of the log file that it prints to."""
    named = [("controller", root)]
    for process in root.children(recursive=True):
        with contextlib.suppress(OSError, psutil.Error):
            log = Path(f"/proc/{process.pid}/fd/1").readlink()
            named.append((log.stem if log.suffix == ".log" else "other", process))
    return named


def _last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines()
    with contextlib.suppress(IndexError, ValueError, KeyError):  # the last one is being written
        row = json.loads(lines[-1])
        return int(row["step"]) if row["kind"] == "step" else -1
    return -1
