"""One version's bytes in a mapped file, whose memory is written again once nobody reads it.

New memory costs the kernel more than the copy into it, so a publisher keeps using what it has. A
reader (`weights/segment_reader.py`) locks the file (flock(2), shared) for as long as it uses the
bytes, whatever becomes of its process; the writer locks it exclusively, and takes other memory
where it cannot.

Invariants: a file has its final name only while its bytes are whole and do not change; the bytes
that a reader uses never change; a reader that comes too late is told so.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import BinaryIO

import torch


class Segment:
    """A file of a publisher, mapped to be written. New ones are at ``path`` and not yet whole.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._file = path.open("w+b")
        try:
            # Reserves the pages: a write to a mapped page without room would kill the process.
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            mapped = mmap.mmap(self._file.fileno(), num_bytes)
        except BaseException:
            self.remove()
            raise
        self._image = torch.frombuffer(mapped, dtype=torch.uint8)

    @property
    def image(self) -> torch.Tensor:
        """The bytes, uint8 [num_bytes]; to be written until they are offered."""
        return self._image

    def offer(self, path: Path) -> None:
        """Give the whole bytes their final name."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.path = self.path.replace(path)

    def take_back(self, path: Path) -> bool:
        """Give it another name, to be written again; False where it cannot be: somebody reads it.

        The name goes first: who opens the file before that and locks it after finds that out.
        """
        try:
            self.path = self.path.replace(path)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Readers keep what they have mapped."""
        self.path.unlink(missing_ok=True)
        self._file.close()


class SegmentWriter:
    """Maps segments of another process, to write a part of their bytes before they are offered.

    Maps stay for as long as their files have names, since mapping costs as much as the copy.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, tuple[BinaryIO, torch.Tensor]] = {}  # by inode

    @property
    def num_mapped(self) -> int:
        return len(self._mapped)

    def image(self, path: Path) -> torch.Tensor:
        """All bytes, uint8 [num_bytes]; written to in place.

        Raises:
            OSError: it is not there.
        """
        for inode, (file, _) in list(self._mapped.items()):
            if os.fstat(file.fileno()).st_nlink == 0:
                file.close()
                del self._mapped[inode]
        inode = path.stat().st_ino
        if inode not in self._mapped:
            file = path.open("r+b")
            mapped = mmap.mmap(file.fileno(), 0)
            self._mapped[inode] = file, torch.frombuffer(mapped, dtype=torch.uint8)
        return self._mapped[inode][1]
