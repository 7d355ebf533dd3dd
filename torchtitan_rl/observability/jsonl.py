"""A file of one JSON object a line, whole after a crash and cut back where a run resumes.

Invariants: a line is handed to the system as soon as it is complete; a line that a crash cut off
disappears at the next opening; numbers that are not finite are written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends objects that have a ``step``.

    Args:
        resume_step: None starts the file anew; a number keeps the lines up to this step.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else _lines_up_to(path, resume_step)
        self.last: dict[str, Any] | None = json.loads(kept[-1]) if kept else None
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_bytes(b"".join(kept))
        unfinished.replace(path)
        self._file = path.open("r+b", buffering=0)
        self._last_start = sum(len(line) for line in kept[:-1])
        self._file.seek(0, 2)

    def append(self, row: Mapping[str, Any]) -> None:
        self._last_start = self._file.tell()
        self._write(row)

    def replace_last(self, row: Mapping[str, Any]) -> None:
        """Write ``row`` over the last line."""
        self._file.seek(self._last_start)
        self._write(row)
        self._file.truncate()

    def close(self) -> None:
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self.last = dict(row)
        line = json.dumps(_finite(row), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        self._file.write(line.encode(errors="backslashreplace") + b"\n")


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    """The whole lines of these steps; a validation's may come after those of later steps."""
    kept: list[bytes] = []
    if not path.exists():
        return kept
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    return kept


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
