"""Writes that stay consistent after a kill or on a full disk: appended lines, and replaced files.

A kill -9 during a write, or a disk that fills up, leaves an incomplete (torn) line at the end of a
file. `open_for_append` cuts such a line off, `append_line` removes the torn line of its own failed
write, and `whole_lines` skips a torn line; it is never joined with a later line.

`read_new` reads what was appended to files, and `FileCopies` appends it to copies, in order and
each byte once. If a file grows faster than it is read, bytes are left out, and a line in the copy
tells how many.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

NO_FILE_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of a lock on storage that has none (some network file systems)."""

_BLOCK_BYTES = 64 << 10


def open_for_append(path: Path) -> FileIO:
    """Open or create a file to append lines to, and cut off a torn last line; raises OSError."""
    file = FileIO(path, "r+" if path.exists() else "w+")
    try:
        size = os.fstat(file.fileno()).st_size
        whole = _end_of_whole_lines(file, size)
        if whole < size:
            file.truncate(whole)
        file.seek(whole)
    except BaseException:
        file.close()
        raise
    return file


def append_line(file: FileIO, data: bytes) -> None:
    """Write ``data``, one or more whole lines, without syncing. If that fails with an OSError,
    nothing of it stays in the file."""
    start = file.tell()
    left = memoryview(data)
    try:
        while left:  # a disk that fills up accepts a part first
            left = left[file.write(left) :]
    except BaseException:
        file.truncate(start)
        file.seek(start)
        raise


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield each line with its newline, except a torn last line; raises OSError."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def last_lines(path: Path, count: int) -> list[str]:
    """The last non-empty lines of a log; an empty list if the log cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - (8 << 10)))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def parse_object(where: str, line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises ValueError, whose message begins with ``where``: the
    line is not JSON, nested too deeply, or not a JSON object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: not a JSON object")
    return found


@contextmanager
def replacing(path: Path, *, is_durable: bool = True) -> Iterator[BufferedWriter]:
    """Yield a file to write to, which replaces ``path`` when the block ends: a reader finds the old
    content or the new. After an error, which may be an OSError of writing, ``path`` is unchanged.
    With ``is_durable`` the block ends only when content and name are on disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if is_durable:
                _sync(file)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_directory(path.parent)


def replace_file(path: Path, content: bytes, *, is_durable: bool = True) -> None:
    """Write a whole file; if that fails, the old file is unchanged. See `replacing`."""
    with replacing(path, is_durable=is_durable) as file:
        file.write(content)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on disk; raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        _sync(file)


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(file: BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())


def _end_of_whole_lines(file: FileIO, size: int) -> int:
    end = size
    while end > 0:
        length = min(_BLOCK_BYTES, end)
        found = os.pread(file.fileno(), length, end - length).rfind(b"\n")
        if found >= 0:
            return end - length + found + 1
        end -= length
    return 0


MAX_PIECE_BYTES = 1 << 20  # bytes of one file in one reading
MAX_BEHIND_BYTES = 16 << 20  # if more bytes are unread, the older ones are skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """Bytes of the file ``name`` from ``start`` on. ``skipped`` bytes before them are left out."""

    name: str
    start: int
    data: bytes
    skipped: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.data)


def file_sizes(folder: Path, patterns: Sequence[str]) -> dict[str, int]:
    """The sizes of the files in ``folder`` that match ``patterns``, by name."""
    sizes = {}
    for path in {path for pattern in patterns for path in folder.glob(pattern)}:
        with suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size
    return sizes


def read_new(
    folder: Path,
    offsets: Mapping[str, int],
    *,
    patterns: Sequence[str],
    max_behind_bytes: int = MAX_BEHIND_BYTES,
) -> list[FilePiece]:
    """Read the bytes after ``offsets`` (by name; 0 for new files) from the files of ``folder``."""
    pieces = []
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        offset = offsets.get(path.name, 0)
        try:
            with path.open("rb") as file:
                behind = file.seek(0, 2) - offset
                skipped = max(0, behind - max_behind_bytes)
                file.seek(offset + skipped)
                data = file.read(MAX_PIECE_BYTES)
        except FileNotFoundError:
            continue  # the file has just been removed
        if data:
            start = offset + skipped
            pieces.append(FilePiece(name=path.name, start=start, data=data, skipped=skipped))
    return pieces


class FileCopies:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.offsets: dict[str, int] = {}  # number of copied bytes of each original, by name

    def path(self, name: str) -> Path:
        return self._folder / name

    def write(self, pieces: Sequence[FilePiece]) -> None:
        """Append pieces to the copies. Pieces that were written before are ignored. Raises OSError:
        a copy cannot be written; its piece may be written again."""
        for piece in pieces:
            if piece.start - piece.skipped != self.offsets.get(piece.name, 0):
                continue  # already written
            self._folder.mkdir(parents=True, exist_ok=True)
            with self.path(piece.name).open("ab") as file:
                if piece.skipped:
                    file.write(f"\n[{piece.skipped} bytes are left out]\n".encode())
                file.write(piece.data)
            self.offsets[piece.name] = piece.end
