"""Follows the files of a run: `RunIndex` has what the page shows of them.

It reads each line once, also while a run writes, is resumed or is replaced by another run in the
same folder. Nothing of it writes into the folder.

Invariants: memory does not grow with the number of rollouts (their rows stay in the files, see
`rollouts.py`), and no row of metrics is kept whole. A line that cannot be read is passed over and
named in `passed_over`; it never ends the reading.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from torchtitan_rl.config.run import IDENTITY_FILE, SETTINGS_FILE
from torchtitan_rl.errors import OutputError
from torchtitan_rl.files import parse_object
from torchtitan_rl.observability.explain import finite
from torchtitan_rl.observability.page_files import NOW_FILE
from torchtitan_rl.observability.sinks import RowKind, row_files
from torchtitan_rl.page.rollouts import RolloutTable
from torchtitan_rl.page.timeline import TraceIndex
from torchtitan_rl.page.values import clean, integer, name_of

MAX_LINE_BYTES = 64 << 20
_MAX_NAMES = 5_000
_MAX_ROWS = 20_000  # of a kind of metrics; beyond, every second row is dropped
_MAX_NUMBERS = 10_000_000  # of a kind of metrics; with more names, it has fewer rows
_MAX_READ = 1_000_000  # numbers that are read for one answer
_MAX_PASSED_OVER = 20
_FRESH_S = 20.0  # a run that lives writes now.json every 2 s


class PlacedLine(NamedTuple):
    """A line, and where it is: the number of its file, its first byte, its number."""

    file: int
    start: int
    number: int
    data: bytes


class GrowingRows:
    """The lines of ``NAME.jsonl`` and of the full files before it, each once. The files stay open,
    so a line can be read again after its file was renamed or removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: list[_OpenFile] = []
        self._num_lines = 0
        self._num_missed = 0

    def is_replaced(self) -> bool:
        """Whether other files have taken the place of those that were read. It is believed when it
        was seen twice, because a file may be renamed while the folder is listed."""
        present = {key for path in _files_of(self._path) if (key := _key(path))}
        is_missed = any(one.key not in present or one.is_cut() for one in self._files)
        self._num_missed = self._num_missed + 1 if is_missed else 0
        return self._num_missed > 1

    def lines(self) -> Iterator[PlacedLine]:
        """The whole lines that were not read yet. A line of more than `MAX_LINE_BYTES` is empty."""
        known = {one.key for one in self._files}
        for path in _files_of(self._path):
            if _key(path) not in known:
                with suppress(OSError):
                    self._files.append(_OpenFile(path.open("rb")))
        for number, one in enumerate(self._files):
            for start, data in one.lines():
                self._num_lines += 1
                yield PlacedLine(number, start, self._num_lines, data)

    def read(self, file: int, start: int, size: int) -> bytes:
        return os.pread(self._files[file].file.fileno(), size, start)

    def close(self) -> None:
        for one in self._files:
            one.file.close()


class _OpenFile:
    def __init__(self, file: BufferedReader) -> None:
        self.file = file
        self.key = _key_of(os.fstat(file.fileno()))
        self._offset = 0
        self._skips = False  # within a line that is too long

    def is_cut(self) -> bool:
        return os.fstat(self.file.fileno()).st_size < self._offset

    def lines(self) -> Iterator[tuple[int, bytes]]:
        self.file.seek(self._offset)
        while data := self.file.readline(MAX_LINE_BYTES):
            is_whole = data.endswith(b"\n")
            if not is_whole and len(data) < MAX_LINE_BYTES:
                return  # it is still being written
            start, was_skipped = self._offset, self._skips
            self._offset += len(data)
            self._skips = not is_whole
            if is_whole:
                yield start, b"" if was_skipped else data


def _files_of(path: Path) -> list[Path]:
    try:
        return row_files(path)
    except OSError:
        return []


def _key(path: Path) -> tuple[int, int] | None:
    try:
        return _key_of(path.stat())
    except OSError:
        return None


def _key_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class Columns:
    """The numbers of one kind of row, by name: one entry for each row, NaN where it has none."""

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.wall_s: array[float] = array("d")
        self.values: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def put(self, step: int, row: Mapping[str, Any]) -> None:
        """Add a row. A later row of the same step replaces the earlier one."""
        at = bisect_left(self.steps, step)
        if at == len(self.steps) or self.steps[at] != step:
            self.steps.insert(at, step)
            self.wall_s.insert(at, math.nan)
            for values in self.values.values():
                values.insert(at, math.nan)
        self.wall_s[at] = _number(row.get("wall_time_s"))
        for name, value in row.items():
            if name in ("step", "wall_time_s", "kind", "version"):
                continue
            if name not in self.values and (name := name_of(name)) not in self.values:
                if len(self.values) >= _MAX_NAMES:
                    continue
                self.values[name] = array("d", [math.nan]) * len(self.steps)
            self.values[name][at] = _number(value)
        if len(self.steps) > max(2, min(_MAX_ROWS, _MAX_NUMBERS // (1 + len(self.values)))):
            self._keep(slice(len(self.steps) % 2, None, 2))

    def cut(self, step: int) -> None:
        """Drop the rows of later steps."""
        self._keep(slice(0, bisect_right(self.steps, step)))

    def row(self, at: int) -> dict[str, float]:
        """The numbers of one row that are finite, by name."""
        row = {n: v[at] for n, v in self.values.items() if math.isfinite(v[at])}
        return row | {"step": self.steps[at], "wall_time_s": self.wall_s[at]}

    def rows(self, *, most: int) -> list[dict[str, float]]:
        """Up to ``most`` rows, evenly spaced, the last one included; fewer if they are wide."""
        most = max(2, min(most, _MAX_READ // (1 + len(self.values))))
        number = len(self.steps)
        stride = max(1, -(-number // most))
        return [self.row(at) for at in range((number - 1) % stride, number, stride)]

    def _keep(self, kept: slice) -> None:
        self.steps, self.wall_s = self.steps[kept], self.wall_s[kept]
        self.values = {name: values[kept] for name, values in self.values.items()}


def _number(value: object) -> float:
    number = finite(value)
    return math.nan if number is None else number


class RunIndex:
    """The index of one folder of a run, or of an evaluation. ``counters`` grow with each change of
    what a view shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counters = {"metrics": 0, "rollouts": 0, "now": 0, "trace": 0}
        self._now_changed_ns = 0
        self._begin()

    def _begin(self) -> None:
        self.columns: dict[str, Columns] = {kind.value: Columns() for kind in RowKind}
        self.passed_over: list[str] = []
        self.num_passed_over = 0
        self.is_read = False  # once all that was there has been read
        self._metrics = GrowingRows(self.folder / "metrics.jsonl")
        self.sources: dict[str, GrowingRows] = {}
        self.rollouts = RolloutTable()
        self.trace = TraceIndex(self.folder / "traces")
        self.described: tuple[Any, dict[str, Any]] | None = None  # by the views: with its key

    @property
    def kind(self) -> str:
        return "eval" if (self.folder / SETTINGS_FILE).exists() else "train"

    def update(self, *, seconds: float) -> bool:
        """Read on for about ``seconds``. Returns whether there is more to read. Raises OutputError
        if the temporary file of the index cannot be written."""
        end_s = time.monotonic() + seconds
        if any(rows.is_replaced() for rows in (self._metrics, *self.sources.values())):
            self.close()
            self._begin()
            self._count("metrics", "rollouts", "trace")
        self._update_now()
        try:
            for read in (self._read_metrics, self._read_rollouts, self._read_trace):
                if not read(end_s):
                    return True
        except sqlite3.Error as error:
            raise OutputError(
                f"the index of the rollouts is too large for the temporary folder: {error}; set "
                "TMPDIR to a folder with more room"
            ) from error
        self.is_read = True
        return False

    def close(self) -> None:
        for rows in (self._metrics, *self.sources.values()):
            rows.close()
        self.rollouts.close()
        self.trace.close()

    def document(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty if it is missing or damaged."""
        try:
            return parse_object(name, (self.folder / name).read_bytes())
        except (OSError, ValueError):
            return {}

    def fields(self) -> dict[str, Any]:
        """The configuration by name."""
        if self.kind == "train":
            return self.document(IDENTITY_FILE)
        fields = self.document(SETTINGS_FILE).get("fields")
        return fields if isinstance(fields, dict) else {}

    def now(self) -> dict[str, Any]:
        """What a live run said last; empty if it does not live."""
        return self.document(NOW_FILE) if self.is_live else {}

    @property
    def is_live(self) -> bool:
        try:
            age_s = time.time() - (self.folder / NOW_FILE).stat().st_mtime
        except OSError:
            return False
        return age_s < _FRESH_S

    def _update_now(self) -> None:
        changed_ns = 0
        with suppress(OSError):
            changed_ns = (self.folder / NOW_FILE).stat().st_mtime_ns
        if changed_ns != self._now_changed_ns:
            self._now_changed_ns = changed_ns
            self._count("now")

    def _read_metrics(self, end_s: float) -> bool:
        for line in self._metrics.lines():
            self._count("metrics")
            for step, row in self._parsed("metrics.jsonl", line):
                kind = row.get("kind")
                if kind == "resumed":
                    for columns in self.columns.values():
                        columns.cut(step)
                elif isinstance(kind, str) and kind in self.columns:
                    self.columns[kind].put(step, row)
            if time.monotonic() > end_s:
                return False
        return True

    def _read_rollouts(self, end_s: float) -> bool:
        is_done = True
        for source, rows in self._rollout_files():
            for line in rows.lines():
                self._count("rollouts")
                where = f"{source}/rollouts.jsonl" if source else "rollouts.jsonl"
                for step, row in self._parsed(where, line):
                    if row.get("kind") == "resumed":
                        self.rollouts.cut(step)
                    else:
                        self.rollouts.put(source, line.file, line.start, len(line.data), step, row)
                if time.monotonic() > end_s:
                    is_done = False
                    break
        self.rollouts.commit()
        return is_done

    def _rollout_files(self) -> list[tuple[str, GrowingRows]]:
        """The files by source: one of a run, and one for each model and temperature of an
        evaluation."""
        paths = [self.folder / "rollouts.jsonl"] if self.kind == "train" else []
        with suppress(OSError):
            paths += sorted(self.folder.glob("**/temperature-*/rollouts.jsonl"))
        for path in paths:
            where = path.parent.relative_to(self.folder)
            name = clean(str(where)) if where.parts else ""
            if name not in self.sources:
                self.sources[name] = GrowingRows(path)
        return list(self.sources.items())

    def _read_trace(self, end_s: float) -> bool:
        num_spans = self.trace.num_spans
        is_done = self.trace.update(end_s)
        if self.trace.num_spans != num_spans:
            self._count("trace")
        return is_done

    def _parsed(self, where: str, line: PlacedLine) -> Iterator[tuple[int, dict[str, Any]]]:
        """The step and the row of a line; nothing for a line that cannot be read."""
        try:
            row = parse_row(line.data)
            yield _step(row), row
        except ValueError as error:
            self.num_passed_over += 1
            if len(self.passed_over) < _MAX_PASSED_OVER:
                self.passed_over.append(f"{where}, line {line.number}: {error}")

    def _count(self, *names: str) -> None:
        for name in names:
            self.counters[name] += 1


def parse_row(line: bytes) -> dict[str, Any]:
    """Broken UTF-8 becomes replacement characters. Raises ValueError if the line is not a JSON
    object, or nested too deeply."""
    try:
        row = msgspec.json.decode(line)
    except (ValueError, RecursionError):  # also lone surrogates, NaN and large numbers, see below
        try:
            row = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _step(row: Mapping[str, Any]) -> int:
    """Raises ValueError if the row has no step."""
    step = integer(row.get("step"))
    if step is None or step < 0:
        raise ValueError("no step")
    return step
