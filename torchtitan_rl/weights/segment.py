"""One version's bytes in a mapped file: written by its publisher, read by processes of the host.

Allocating memory costs the kernel more than copying into it, and mapping it about half as much, so
both sides reuse what they have: the publisher writes a later version into the file of one that is
no longer read, and readers keep their maps for it. A reader locks the file (flock(2), shared) while
it uses the bytes, and the lock ends with its process; the publisher reuses a file only if it gets
an exclusive lock.

Invariants: a file has its final name only while its bytes are complete and do not change; bytes in
use by a reader never change; a reader that opened a file too late gets an error; a map is reused
only if this process never wrote to it, since pages it wrote to are private copies and hide what the
publisher writes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

# When a page is read, Linux also maps what is in memory around it (fault_around_bytes in debugfs).
# 538 MB take 23 ms this way, 32 ms with MADV_POPULATE_READ, 37 ms if each page is touched.
_FAULT_AROUND_BYTES = 64 << 10

# Bits of an entry of /proc/self/pagemap, which has one of 64 bits for each page:
# https://docs.kernel.org/admin-guide/mm/pagemap.html
_PAGEMAP = "/proc/self/pagemap"
_IN_MEMORY_OR_SWAP = np.uint64(0b11 << 62)
_OF_A_FILE = np.uint64(1 << 61)

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Segment:
    """A publisher's file, mapped for writing. A new one is at ``path`` and incomplete.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._file = path.open("w+b")
        try:
            # Reserve the pages: writing to a mapped page without room would kill the process.
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            mapped = mmap.mmap(self._file.fileno(), num_bytes)
        except BaseException:
            self.remove()
            raise
        # The bytes, uint8 [num_bytes]; may be written until they are offered.
        self.image = torch.frombuffer(mapped, dtype=torch.uint8)

    def offer(self, path: Path) -> None:
        """Give the complete bytes their final name."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.path = self.path.replace(path)

    def take_back(self, path: Path) -> bool:
        """Rename it to be written again; False if a reader uses it.

        Renaming comes first: a reader that opened the file before and locks it later notices.
        """
        try:
            self.path = self.path.replace(path)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Delete the file. Readers keep what they have mapped."""
        self.path.unlink(missing_ok=True)
        self._file.close()


class SegmentWriter:
    """Maps segments of another process, to write a part of their bytes before they are offered.

    Maps are kept while their files have names, since mapping costs as much as the copy.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, tuple[BinaryIO, torch.Tensor]] = {}  # by inode

    def image(self, path: Path) -> torch.Tensor:
        """All bytes, uint8 [num_bytes], for writing in place.

        Raises:
            OSError: there is no such file.
        """
        for inode, (file, _) in list(self._mapped.items()):
            if not _has_name(file):
                file.close()
                del self._mapped[inode]
        inode = path.stat().st_ino
        if inode not in self._mapped:
            file = path.open("r+b")
            mapped = mmap.mmap(file.fileno(), 0)
            self._mapped[inode] = file, torch.frombuffer(mapped, dtype=torch.uint8)
        return self._mapped[inode][1]


class SegmentReader:
    """Maps published segments for reading. All methods may be called from any thread.

    Maps are kept while their files have names; the memory of a removed version is freed when no
    tensor of it exists and `examine` runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, _Map] = {}  # by inode; reusable
        self._unused: deque[_Map] = deque()  # no tensor uses them; not yet examined

    def image(self, path: Path) -> torch.Tensor:
        """All bytes of a published file, uint8, locked while the tensor or a view of it exists.

        All pages are mapped: later reads cause no page fault. Writing to the tensor changes only
        what this reader sees.

        Raises:
            OSError: the file is gone, or about to be written again.
            ValueError: it is empty.
        """
        self.examine()
        with self._lock:
            found = self._idle.pop(path.stat().st_ino, None)
        found = found or _Map(path)
        found.flock(fcntl.LOCK_SH | fcntl.LOCK_NB)
        if path.stat().st_ino != found.inode:
            raise FileNotFoundError(f"{path} was replaced")
        held = memoryview(found.memory)  # by the tensor's storage, which views share
        image = torch.frombuffer(held, dtype=torch.uint8)
        weakref.finalize(held, self._release, found).atexit = False
        image[::_FAULT_AROUND_BYTES].sum()
        return image

    def examine(self) -> int:
        """Find out which unused maps can be reused, and drop the others; returns the number of the
        former. `image` does it too, but then its caller waits: a third of the time of mapping."""
        with self._lock:
            while self._unused:
                found = self._unused.popleft()
                if found.is_as_published():
                    self._idle[found.inode] = found
            self._idle = {i: idle for i, idle in self._idle.items() if _has_name(idle.file)}
            return len(self._idle)

    def _release(self, unused: _Map) -> None:
        """No tensor uses the map any more. Runs in any thread, at any moment: takes no lock."""
        unused.flock(fcntl.LOCK_UN)
        self._unused.append(unused)


class _Map:
    """A private copy-on-write map of a file. Its locks are those of the open file."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("rb")
        self.memory = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.inode = os.fstat(self.file.fileno()).st_ino
        self._address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def flock(self, operation: int) -> None:
        """Without effect on file systems without locks (none is a shared-memory file system, and
        elsewhere the publisher does not reuse files)."""
        try:
            fcntl.flock(self.file, operation)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def is_as_published(self) -> bool:
        """Whether every page is the file's; False if the kernel does not tell."""
        page = mmap.PAGESIZE
        num_pages = -(-len(self.memory) // page)
        try:
            with open(_PAGEMAP, "rb", buffering=0) as file:
                file.seek(self._address // page * 8)
                content = file.read(num_pages * 8)
        except OSError:
            return False
        entries = np.frombuffer(content, dtype=np.uint64)
        is_own = ((entries & _IN_MEMORY_OR_SWAP) != 0) & ((entries & _OF_A_FILE) == 0)
        return len(entries) == num_pages and not is_own.any()


def _has_name(file: BinaryIO) -> bool:
    return os.fstat(file.fileno()).st_nlink > 0
