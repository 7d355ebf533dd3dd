"""Published segments, mapped to be read; a map is used again for what comes next in its memory.

Mapping costs about half of what copying the bytes does, so a map of a version that nobody uses any
more waits for the publisher to write a later one into the same file (see `weights/segment.py`).

Invariants: a file is locked (flock(2), shared) while a tensor of it lives, and only then; a map is
used again only where this process has never written to it, since pages that it did write to are its
own and hide what the publisher writes.
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

# Linux maps what is in memory around a page that is read (fault_around_bytes in debugfs). 538 MB
# take 23 ms so; 32 ms with MADV_POPULATE_READ, and 37 ms where each page is touched.
_FAULT_AROUND_BYTES = 64 << 10

# Bits of an entry of /proc/self/pagemap, which has one of 64 bits for each page:
# https://docs.kernel.org/admin-guide/mm/pagemap.html
_PAGEMAP = "/proc/self/pagemap"
_IN_MEMORY_OR_SWAP = np.uint64(0b11 << 62)
_OF_A_FILE = np.uint64(1 << 61)


class SegmentReader:
    """Maps of one process. They stay for as long as their files have names: memory of a version
    that was removed is given back when no tensor of it lives and maps are examined.

    All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, _Map] = {}  # by inode; may be used again
        self._given_up: deque[_Map] = deque()  # no tensor of them lives; not yet examined

    def image(self, path: Path) -> torch.Tensor:
        """All bytes of a published file, uint8, locked for as long as the tensor or a view lives.

        All pages are there: reading them later meets no page fault. Writing to them changes what
        this reader sees, and nothing else.

        Raises:
            OSError: it is gone, or about to be written again.
            ValueError: it is empty.
        """
        self.examine()
        with self._lock:
            found = self._idle.pop(path.stat().st_ino, None)
        found = found or _Map(path)
        found.lock()
        if path.stat().st_ino != found.inode:
            raise FileNotFoundError(f"{path} was given up")
        held = memoryview(found.memory)  # by the tensor's storage, which views share
        image = torch.frombuffer(held, dtype=torch.uint8)
        weakref.finalize(held, self._give_up, found).atexit = False
        image[::_FAULT_AROUND_BYTES].sum()
        return image

    def examine(self) -> int:
        """See which maps can be used again, and let go of the others; the number of the former.

        `image` does it, too, but then its caller waits for it: a third of what mapping takes.
        """
        with self._lock:
            while self._given_up:
                found = self._given_up.popleft()
                if found.is_as_published():
                    self._idle[found.inode] = found
            self._idle = {inode: idle for inode, idle in self._idle.items() if idle.has_name()}
            return len(self._idle)

    def _give_up(self, unused: _Map) -> None:
        """When no tensor of it lives, in any thread, whatever that is doing: takes no lock."""
        unused.unlock()
        self._given_up.append(unused)


class _Map:
    """A private copy-on-write map of a file. Locks are those of the open file."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("rb")
        self.memory = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.inode = os.fstat(self._file.fileno()).st_ino
        self._address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def has_name(self) -> bool:
        return os.fstat(self._file.fileno()).st_nlink > 0

    def lock(self) -> None:
        self._flock(fcntl.LOCK_SH | fcntl.LOCK_NB)

    def unlock(self) -> None:
        self._flock(fcntl.LOCK_UN)

    def is_as_published(self) -> bool:
        """Whether every page is the file's; False where the kernel does not tell."""
        page = mmap.PAGESIZE
        num_pages = -(-len(self.memory) // page)
        try:
            with open(_PAGEMAP, "rb", buffering=0) as file:
                file.seek(self._address // page * 8)
                told = file.read(num_pages * 8)
        except OSError:
            return False
        entries = np.frombuffer(told, dtype=np.uint64)
        is_own = ((entries & _IN_MEMORY_OR_SWAP) != 0) & ((entries & _OF_A_FILE) == 0)
        return len(entries) == num_pages and not is_own.any()

    def _flock(self, operation: int) -> None:
        """Other file systems than those for shared memory may know no locks; there nothing is
        written again (see `SharedMemoryPublisher`)."""
        try:
            fcntl.flock(self._file, operation)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
