"""A file of one JSON object a line, whole after a crash and cut back where a run resumes.

``NAME.jsonl`` is the file that is written to. When it is full it is renamed to
``NAME.000001.jsonl`` (the next one to ``NAME.000002.jsonl``), and a new one is begun. A change that
is not an append (the last line is written again; a resume drops lines) is noted in
``NAME.jsonl.tail`` first, so that it can be done again where the process is killed in between.

Invariants: a line is handed to the system before `append` returns; a line that a crash cut off
disappears at the next opening, and is never read; no line that was whole is lost but those that a
resume drops; numbers that are not finite are written as null; memory and time of a resume do not
grow with the files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import OutputError
from torchtitan_rl.files import (
    append_line,
    lines_from_the_end,
    open_for_append,
    whole_lines,
)

MAX_BYTES = 256 << 20
_TAIL_SUFFIX, _UNFINISHED = ".tail", ".unfinished"

Row = dict[str, Any]


class JsonLines:
    """Appends objects that have a ``step``.

    Args:
        resume_step: None starts the file anew; a number keeps the lines up to this step.
        is_step: True for lines that are written in step order (an evaluation's are not). Cutting
            back stops at the first such line at or before ``resume_step``.
        max_bytes: of a file, but for its last line.

    Raises:
        OutputError: it cannot be opened, or holds lines that are not ours (with file and line, and
            from `lines_of` too); from `append` and `replace_last`: it cannot be written to.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int | None,
        is_step: Callable[[Mapping[str, Any]], bool] = lambda row: True,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path = path
        self._is_step = is_step
        self._max_bytes = max_bytes
        self.last: Row | None = None
        self._last_start = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _remove_all(path)
            else:
                _redo_tail(path)
                _cut_back(path, resume_step, is_step)
            self._file = open_for_append(path)
            size = self._file.tell()
            for start, line in lines_from_the_end(self._file, size):
                self.last, self._last_start = _row(path, start, line), start
                break
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{path}: {error!r}") from error

    def lines_of(self, step: int, is_wanted: Callable[[Mapping[str, Any]], bool]) -> list[bytes]:
        """The lines of ``step`` that are wanted. Looks back to the step before it."""
        self._require_open()
        found = []
        for start, line in lines_from_the_end(self._file, self._file.tell()):
            row = _row(self._path, start, line)
            if row["step"] == step and is_wanted(row):
                found.append(line)
            elif row["step"] < step and self._is_step(row):
                break
        return found[::-1]

    def append(self, *rows: Mapping[str, Any]) -> list[bytes]:
        """Write lines, all or none of them; returns them."""
        if not rows:
            return []
        lines = [_line(row) for row in rows]
        self._require_open()
        try:
            if self._file.tell() >= self._max_bytes:
                self._rotate()
            append_line(self._file, b"".join(lines))
        except OSError as error:
            raise OutputError(f"{self._path}: {error}") from error
        self.last, self._last_start = dict(rows[-1]), self._file.tell() - len(lines[-1])
        return lines

    def replace_last(self, row: Mapping[str, Any]) -> None:
        """Write ``row`` in the place of the last line. Where it fails, nothing can be written any
        more, and the next opening does it again."""
        self._require_open()
        try:
            _write_tail(self._path, self._path, self._last_start, _line(row))
        except OSError as error:
            raise OutputError(f"{self._path}: {error}") from error
        self._file.close()
        try:
            _redo_tail(self._path)
            self._file = open_for_append(self._path)
        except OSError as error:
            raise OutputError(f"{self._path}: {error}") from error
        self.last = dict(row)

    def close(self) -> None:
        self._file.close()

    def _require_open(self) -> None:
        if self._file.closed:
            raise OutputError(f"{self._path}: the file is closed")

    def _rotate(self) -> None:
        names = rotated(self._path)
        index = 1 + (_index(self._path, names[-1]) if names else 0)
        self._path.rename(self._path.with_suffix(f".{index:06d}{self._path.suffix}"))
        self._file.close()
        self._file = open_for_append(self._path)
        self.last = None


def rotated(path: Path) -> list[Path]:
    """The full files that came before ``path``, in the order they were written in."""
    found = [one for one in path.parent.glob(f"{path.stem}.*{path.suffix}") if _index(path, one)]
    return sorted(found, key=lambda one: _index(path, one))


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(where, row) of all `read_lines`.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line that is whole is no JSON object; the message says which.
    """
    for where, line in read_lines(path):
        yield where, parse_line(where, line)


def parse_line(where: str, line: bytes) -> Row:
    """
    Raises:
        ValueError: it is no JSON object; the message says where.
    """
    try:
        return _parse(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(where, line with its end) of ``path`` and of the files before it, as the next opening would
    find them; changes nothing.

    Raises:
        OSError: a file cannot be read.
    """
    cut_file, cut, tail = _read_tail(path) or ("", 0, b"")
    for file in [*rotated(path), path]:
        offset = 0
        for number, line in enumerate(whole_lines(file) if file.exists() else (), start=1):
            if file.name == cut_file and offset >= cut:
                break
            offset += len(line)
            yield f"{file.name}, line {number}", line
        if file.name == cut_file and file.exists():
            yield from ((f"{file.name}, its tail", line) for line in tail.splitlines(keepends=True))
            return


def _parse(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _row(file: Path, start: int, line: bytes) -> Row:
    """The row in a ``line`` that begins at ``start`` of its file.

    Raises:
        OutputError: it is none.
    """
    try:
        row = _parse(line)
        if isinstance(row.get("step"), int):
            return row
        message = "not an object with a step"
    except ValueError as error:
        message = str(error)
    with file.open("rb") as opened:
        number, at = 1, 0
        for before in opened:
            at += len(before)
            number += at <= start
    raise OutputError(f"{file}, line {number}: {message}; repair or remove the line")


def _cut_back(path: Path, step: int, is_step: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drop the lines of later steps; files that hold no others go."""
    late: list[bytes] = []  # lines that stay, though they come after some that do not
    files = [*rotated(path), path] if path.exists() else rotated(path)
    for file in reversed(files):
        kept: list[tuple[int, bytes]] = []  # from the last one on
        with open_for_append(file) as opened:
            size = cut = opened.tell()
            for start, line in lines_from_the_end(opened, size):
                row = _row(file, start, line)
                if row["step"] > step:
                    cut = start
                    continue
                kept.append((start, line))
                if is_step(row):
                    if cut < size or late or file != path:
                        tail = [line for start, line in reversed(kept) if start > cut]
                        _write_tail(path, file, cut, b"".join(tail + late))
                        _redo_tail(path)
                    return
        late = [line for _, line in reversed(kept)] + late  # nothing of it stays in its place
    if files:
        _write_tail(path, files[0], 0, b"".join(late))
        _redo_tail(path)


def _write_tail(path: Path, file: Path, offset: int, data: bytes) -> None:
    """Note that ``file`` becomes its first ``offset`` bytes and ``data``, and the last of all."""
    note = path.with_name(path.name + _TAIL_SUFFIX)
    unfinished = note.with_name(note.name + _UNFINISHED)
    head = json.dumps({"file": file.name, "offset": offset}).encode()
    try:
        unfinished.write_bytes(head + b"\n" + data)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(note)


def _read_tail(path: Path) -> tuple[str, int, bytes] | None:
    """(file, offset, data) of what is to be done yet; None where there is nothing."""
    note = path.with_name(path.name + _TAIL_SUFFIX)
    try:
        head, _, data = note.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    place = json.loads(head)
    return place["file"], place["offset"], data


def _redo_tail(path: Path) -> None:
    """Do what `_write_tail` noted; may be done again at any point of it."""
    path.with_name(f"{path.name}{_TAIL_SUFFIX}{_UNFINISHED}").unlink(missing_ok=True)
    pending = _read_tail(path)
    if pending is None:
        return
    name, offset, data = pending
    file = path.with_name(name)
    if file.exists():
        with FileIO(file, "r+") as opened:
            opened.truncate(offset)
            opened.seek(offset)
            append_line(opened, data)
        for later in [*rotated(path), path]:
            if file != path and (later == path or _index(path, later) > _index(path, file)):
                later.unlink(missing_ok=True)
        if file != path:
            file.rename(path)
    path.with_name(path.name + _TAIL_SUFFIX).unlink()


def _remove_all(path: Path) -> None:
    for old in (*rotated(path), path.with_name(path.name + _TAIL_SUFFIX), path):
        old.unlink(missing_ok=True)


def _index(path: Path, file: Path) -> int:
    """The number in the name of a file that came before ``path``; 0 for any other."""
    pattern = rf"{re.escape(path.stem)}\.(\d{{6,}}){re.escape(path.suffix)}"
    match = re.fullmatch(pattern, file.name)
    return int(match[1]) if match else 0


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        text = _dumps(row)
    except (ValueError, TypeError):  # a number that is not finite, or a mapping of another kind
        text = _dumps(_finite(row))
    return text.encode(errors="backslashreplace") + b"\n"


def _dumps(row: Any) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
