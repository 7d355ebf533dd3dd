"""Writes rows to ``metrics.jsonl`` and ``rollouts.jsonl``.

Metrics have the names in the table of `docs/metrics.md`. In the table, a name with braces stands
for several names. A name that ends in ``/*`` stands for a *family*: all names that begin with the
part before ``*``. The names in a family depend on a task or a cause.

Files of rows are only appended to. A full file is renamed to ``NAME.000001.jsonl`` (the next one to
``NAME.000002.jsonl``), and a new ``NAME.jsonl`` is begun. A resumed run appends
``{"kind":"resumed","step":N}``: earlier rows of steps after N no longer count, because these steps
are repeated. `read_rows` leaves such rows out.

Invariants: a row is passed to the operating system before `append` returns. An incomplete row after
a crash is removed when the file is next opened, and is never read. No other row is lost. Only names
of the metric table are written. Numbers that are not finite are written as null.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from torchtitan_rl.errors import OutputError
from torchtitan_rl.files import append_line, open_for_append, parse_object, whole_lines

MAX_BYTES = 256 << 20
METRIC_TABLE = Path(__file__).with_name("metrics.md")
_ROW = re.compile(r"^\| `(.+?)` \|", re.MULTILINE)
_RESUMED = "resumed"
_RESUMED_START = b'{"kind":"resumed"'

Row = dict[str, Any]


class RowLog:
    """Appends rows to ``path``. ``is_new``: remove the rows of an earlier run. ``max_bytes``: a
    file of at least this size is full. Raises OutputError, also by `append`: the file cannot be
    opened or written."""

    def __init__(self, path: Path, *, is_new: bool, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_new:
                for old in row_files(path):
                    old.unlink(missing_ok=True)
            self._file = open_for_append(path)
        except OSError as error:
            raise OutputError(f"{path}: {error}") from error

    @classmethod
    def of_run(cls, path: Path, *, resume_step: int | None) -> RowLog:
        """Open the rows of a run: a new run, or one that continues after ``resume_step``."""
        log = cls(path, is_new=resume_step is None)
        if resume_step is not None:
            log.append({"kind": _RESUMED, "step": resume_step, "wall_time_s": time.time()})
        return log

    def append(self, *rows: Mapping[str, Any]) -> list[bytes]:
        """Write all rows or none, and return their lines."""
        lines = [_line(row) for row in rows]
        try:
            if lines and self._file.tell() >= self._max_bytes:
                self._begin_file()
            append_line(self._file, b"".join(lines))
        except OSError as error:
            raise OutputError(f"{self._path}: {error}") from error
        return lines

    def close(self) -> None:
        self._file.close()

    def _begin_file(self) -> None:
        index = 1 + max((_index(self._path, file) for file in row_files(self._path)), default=0)
        with suppress(FileNotFoundError):  # already renamed, but the next could not be opened
            self._path.rename(self._path.with_suffix(f".{index:06d}{self._path.suffix}"))
        full, self._file = self._file, open_for_append(self._path)
        full.close()


class Line(NamedTuple):
    """A row with its place and its bytes. ``life``: how often the run was resumed before this
    row."""

    where: str
    data: bytes
    row: Row
    life: int


def read_rows(path: Path) -> Iterator[Line]:
    """Yield the rows of the full files before ``path`` and of ``path``, in their order.

    Rows of steps that a resumed run repeats are left out. If a resumed run repeats an evaluation,
    the rows of both evaluations are yielded. One row is in memory at a time. Raises OSError, or
    ValueError that says which line is not JSON, not an object, or has no step."""
    resumed = [
        (number, step_in(where, parse_object(where, line)))
        for number, (where, line) in enumerate(_lines(path))
        if line.startswith(_RESUMED_START)
    ]
    life = 0
    limits = [min(step for _, step in resumed[n:]) for n in range(len(resumed))]
    for number, (where, line) in enumerate(_lines(path)):
        if life < len(resumed) and number == resumed[life][0]:
            life += 1
            continue
        row = parse_object(where, line)
        if life == len(limits) or step_in(where, row) <= limits[life]:
            yield Line(where, line, row, life)


def step_in(where: str, row: Row) -> int:
    """Raises ValueError if the row, which ``where`` names, has no step."""
    step = row.get("step")
    if not isinstance(step, int):
        raise ValueError(f"{where}: step = {step!r} is not an integer")
    return step


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    for file in row_files(path):
        for number, line in enumerate(whole_lines(file), start=1):
            yield f"{file.name}, line {number}", line


def row_files(path: Path) -> list[Path]:
    """The full files that were written before ``path``, in their order, then ``path`` itself."""
    found = [one for one in path.parent.glob(f"{path.stem}.*{path.suffix}") if _index(path, one)]
    return sorted(found, key=lambda one: _index(path, one)) + [path] * path.exists()


def _index(path: Path, file: Path) -> int:
    """The number in the name of a full file; 0 for any other file."""
    pattern = rf"{re.escape(path.stem)}\.(\d{{6,}}){re.escape(path.suffix)}"
    match = re.fullmatch(pattern, file.name)
    return int(match[1]) if match else 0


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(row) + b"\n"  # ten times as fast as json; NaN becomes null
    except (OverflowError, TypeError, ValueError):
        # a large integer, a number of another type, a lone surrogate
        text = json.dumps(_finite(row), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode(errors="backslashreplace") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Split(StrEnum):
    """The kind of rollouts that a metric describes; part of the metric's name."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class RowKind(StrEnum):
    """The kind of a row of ``metrics.jsonl``."""

    STEP = "step"
    EVALUATION = "evaluation"
    ACCOUNT = "account"  # the ledger compared with the replicas


class MetricsLog:
    """``resume_step``: the step after which the run continues; None for a new run."""

    def __init__(self, run_dir: Path, *, resume_step: int | None = None) -> None:
        self._rows = RowLog.of_run(run_dir / "metrics.jsonl", resume_step=resume_step)

    def record(self, kind: RowKind, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Raises ValueError if a name is not in the metric table, and OutputError."""
        check_names(metrics)
        row: Row = {"kind": kind, "step": step, "wall_time_s": time.time(), "version": version}
        self._rows.append(row | {name: float(value) for name, value in metrics.items()})

    def close(self) -> None:
        self._rows.close()


@cache
def metric_names() -> frozenset[str]:
    """The names in the table. A name that ends in ``/*`` is a family (see the module)."""
    rows = _ROW.findall(METRIC_TABLE.read_text(encoding="utf-8"))
    return frozenset(name for row in rows for name in expand_names(row))


def is_known(name: str) -> bool:
    """Whether ``name`` is in the table, or belongs to one of its families."""
    if name in metric_names():
        return not name.endswith("/*")
    families = (one.removesuffix("*") for one in metric_names() if one.endswith("/*"))
    return any(name.startswith(family) and name != family for family in families)


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError if a name is not in the table."""
    if unknown := sorted(name for name in names if not is_known(name)):
        raise ValueError(f"unknown metrics {unknown}: add them to docs/metrics.md")


def expand_names(row: str) -> Iterable[str]:
    """Expand the braces of a row of the table.

    >>> list(expand_names("{train,evaluation}/reward_{mean,max}"))
    ['train/reward_mean', 'train/reward_max', 'evaluation/reward_mean', 'evaluation/reward_max']
    """
    parts = re.split(r"\{(.+?)\}", row)  # every second part was in braces
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return map("".join, product(*choices))
