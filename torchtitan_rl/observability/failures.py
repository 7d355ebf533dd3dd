"""Writes and reads ``failures.jsonl``: a row for each failure, once its part serves again or is
given up.

All rows count, also those of steps that a resumed run has repeated.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_rl.errors import OutputError
from torchtitan_rl.failures import Failure, Part
from torchtitan_rl.observability.sinks import Row, RowLog, read_rows, row_files

FAILURES = "failures.jsonl"
_SUMS = ("silent_s", "restart_s", "serve_s", "tokens_again", "steps_again", "requests_again")
_SECONDS = {"silent_s": "seen after", "restart_s": "restarted after", "serve_s": "served after"}
_AGAIN = {
    "tokens_again": "tokens sampled again",
    "steps_again": "steps taken again",
    "requests_again": "requests sent again",
}


class FailureLog:
    """Writes the rows of one run, and sums them up since this process started. A run without
    failures has no file. Raises OutputError, also by `record`: a file cannot be removed or written.
    """

    def __init__(self, run_dir: Path, *, is_new: bool) -> None:
        self._path = run_dir / FAILURES
        self._rows: RowLog | None = None
        if is_new and row_files(self._path):
            RowLog(self._path, is_new=True).close()
            self._path.unlink()
        self._sums: Counter[str] = Counter()

    def record(self, step: int, failure: Failure) -> None:
        """Write the row of a failure that has ended. ``step`` is the run's last finished step."""
        row = asdict(failure)
        del row["seen_s"]  # of a clock that only this process has
        prefix = f"failures/{failure.part}"
        self._sums[f"{prefix}/number"] += 1
        self._sums.update({f"{prefix}/{name}": row[name] or 0 for name in _SUMS})
        self._rows = self._rows or RowLog(self._path, is_new=False)
        self._rows.append({"step": step, "wall_time_s": time.time()} | row)

    def metrics(self) -> dict[str, float]:
        """The sums by kind of part."""
        return {name: float(value) for name, value in self._sums.items()}

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


def read_failures(run_dir: Path) -> list[Row]:
    """The rows of a run; empty if the file is missing. Raises OutputError if one cannot be read."""
    try:
        return [line.row for line in read_rows(run_dir / FAILURES)]
    except (OSError, ValueError) as error:
        raise OutputError(f"{FAILURES}: {error}") from error


def failure_errors(row: Row) -> Iterator[str]:
    """The errors of a row: a report that has not ended, or that cannot be true."""
    if bool(row["given_up"]) == (row["serve_s"] is not None):
        yield f"{row['name']} has to serve again or to be given up"
    values = [row[name] for name in _SUMS if row[name] is not None]
    if any(value < 0 for value in values):
        yield f"{row['name']}: negative seconds, tokens or steps: {values}"
    if (row["restart_s"] or 0) > (row["serve_s"] or math.inf):
        yield f"{row['name']} serves before its processes have started"


def number_in(row: Row) -> int:
    """Return how many failures a row of ``metrics.jsonl`` counts."""
    return int(sum(row.get(f"failures/{part}/number", 0) for part in Part))


def summarize_failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each kind of part that was lost: how often, the median and the largest of its
    seconds, and what was done again."""
    by_part: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_part[str(row.get("part"))].append(row)
    return [_summarize(part, of_part) for part, of_part in by_part.items()]


def _summarize(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    signs = Counter(str(row.get("sign")) for row in rows)
    seen = ", ".join(f"{number} {sign}" for sign, number in signs.items())
    parts = [f"{part} lost {len(rows)} times ({seen})"]
    for name, words in _SECONDS.items():
        if values := _numbers(rows, name):
            parts.append(f"{words} {median(values):.1f} s (at most {max(values):.1f} s)")
    for name, words in _AGAIN.items():
        if number := sum(_numbers(rows, name)):
            parts.append(f"{number:.0f} {words}")
    if given_up := sum(bool(row.get("given_up")) for row in rows):
        parts.append(f"{given_up} given up")
    return ", ".join(parts)


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values: list[Any] = [row.get(name) for row in rows]
    return [float(one) for one in values if isinstance(one, int | float)]
