"""Brings files that grow on another host here: what is new, in pieces of bounded size.

Invariants: what is written here is what was there, in order, with a line that says how much was
left out where the files grew faster than they were read; a piece that is read again is not written
twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_PIECE_BYTES = 1 << 20  # of one file in one reading
MAX_BEHIND_BYTES = 16 << 20  # more than this is skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """Bytes of the file ``name`` from ``start`` on; ``skipped`` bytes before it are left out."""

    name: str
    start: int
    data: bytes
    skipped: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.data)


def file_sizes(folder: Path, patterns: Sequence[str]) -> dict[str, int]:
    """Of the files that are there, by name."""
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
    max_piece_bytes: int = MAX_PIECE_BYTES,
    max_behind_bytes: int = MAX_BEHIND_BYTES,
) -> list[FilePiece]:
    """What the files of ``folder`` have after ``offsets`` (by name; 0 for new ones)."""
    pieces = []
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        offset = offsets.get(path.name, 0)
        try:
            with path.open("rb") as file:
                behind = file.seek(0, 2) - offset
                skipped = max(0, behind - max_behind_bytes)
                file.seek(offset + skipped)
                data = file.read(max_piece_bytes)
        except FileNotFoundError:
            continue  # it was removed just now
        if data:
            start = offset + skipped
            pieces.append(FilePiece(name=path.name, start=start, data=data, skipped=skipped))
    return pieces


class FileCopies:
    """The copies in ``folder``, named as the originals."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.offsets: dict[str, int] = {}  # of the originals, by name

    def path(self, name: str) -> Path:
        return self._folder / name

    def write(self, pieces: Sequence[FilePiece]) -> None:
        """
        Raises:
            OSError: a copy cannot be written; its piece may be written again.
        """
        for piece in pieces:
            if piece.start - piece.skipped != self.offsets.get(piece.name, 0):
                continue  # known
            self._folder.mkdir(parents=True, exist_ok=True)
            with self.path(piece.name).open("ab") as file:
                if piece.skipped:
                    file.write(f"\n[{piece.skipped} bytes are left out]\n".encode())
                file.write(piece.data)
            self.offsets[piece.name] = piece.end


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log that are not empty; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - (8 << 10)))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
