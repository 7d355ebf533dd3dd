"""Files of lines that are only appended to, and what a killed process leaves of them.

A kill -9 in the middle of a write leaves the beginning of a line at the end of its file, and so
does a disk that fills up. `open_for_append` cuts such a line off before anything comes after it,
`append_line` takes its own back where it fails, and `whole_lines` passes over it.

Invariant: what comes after a torn line never becomes part of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

_BLOCK_BYTES = 64 << 10


def open_for_append(path: Path) -> FileIO:
    """Open, or make, a file whose last line is whole from now on; nothing is read but its end.

    Raises:
        OSError: it cannot be opened.
    """
    file = FileIO(path, "r+" if path.exists() else "w+")
    try:
        size = os.fstat(file.fileno()).st_size
        whole = end_of_whole_lines(file, size)
        if whole < size:
            file.truncate(whole)
        file.seek(whole)
    except BaseException:
        file.close()
        raise
    return file


def append_line(file: FileIO, data: bytes) -> None:
    """Hand ``data``, one or more whole lines, to the system: all of it or, where that fails,
    nothing.

    Raises:
        OSError: it cannot be written.
    """
    start = file.tell()
    left = memoryview(data)
    try:
        while left:  # a disk that fills up takes a part first
            left = left[file.write(left) :]
    except BaseException:
        file.truncate(start)
        file.seek(start)
        raise


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines, each with its end, without a last one that is torn; one is in memory at a time.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def lines_from_the_end(file: FileIO, size: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its end) of the first ``size`` bytes, which end with a whole line, the
    last one first; reads no more than is asked for."""
    start, block, rest = size, _BLOCK_BYTES, b""  # rest: from `start` to the end of a line
    while start > 0:
        length = min(block, start)
        start -= length
        rest = _read_at(file, start, length) + rest
        first_end = 0 if start == 0 else rest.find(b"\n", 0, len(rest) - 1) + 1
        if start > 0 and first_end == 0:
            block *= 2  # a line longer than what was read
            continue
        end = len(rest)
        while end > first_end:
            begin = rest.rfind(b"\n", first_end, end - 1) + 1 or first_end
            yield start + begin, rest[begin:end]
            end = begin
        rest, block = rest[:first_end], _BLOCK_BYTES


def end_of_whole_lines(file: FileIO, size: int) -> int:
    """Where the last of the whole lines in the first ``size`` bytes ends."""
    end = size
    while end > 0:
        length = min(_BLOCK_BYTES, end)
        found = _read_at(file, end - length, length).rfind(b"\n")
        if found >= 0:
            return end - length + found + 1
        end -= length
    return 0


def _read_at(file: FileIO, start: int, length: int) -> bytes:
    return os.pread(file.fileno(), length, start)
