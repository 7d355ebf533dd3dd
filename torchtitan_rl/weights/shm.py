"""Publishes each version of the weights as a safetensors file in shared memory, for readers on the
same host.

These are plain files, because the tracker of ``multiprocessing.SharedMemory`` unlinks a block when
another process ends. Allocating memory costs the kernel more time than copying into it, and mapping
it about half as much. So both sides reuse memory: the publisher writes a later version into the
file of a released version that no reader uses, and readers keep their maps of this file. A reader
locks the file (flock(2), shared) while it uses the bytes; the lock ends with the reader's process.
The publisher reuses a file only if it gets an exclusive lock.

Invariants
- A file has its final name only while its bytes are complete and do not change. Bytes in use by a
  reader never change; a reader that opened a file too late gets an error.
- While a version is written, the only other versions that exist are the current one and those in
  ``keep``.
- A map is reused only if this process never wrote to it. A page that was written to is a private
  copy, which would hide the publisher's later writes. Maps that are pinned for CUDA are shared,
  because pinning a private map copies it; a process with CUDA must not write to them.
- Pinned memory is released before it is unmapped.
- The folder is removed when its process ends (see `weights/shm_cleanup.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.files import NO_FILE_LOCKS
from torchtitan_rl.weights.distribution import SharedMemoryHandle, versions_to_free
from torchtitan_rl.weights.image import ImageLayout, plan_image, read_image, write_image
from torchtitan_rl.weights.pinning import HostPins
from torchtitan_rl.weights.shm_cleanup import (
    HEADROOM_BYTES,
    SHARED_MEMORY_ROOT,
    FolderGuard,
    folder_name,
    make_folder,
    remove_leftovers,
)


class SharedMemoryPublisher:
    """Writes versions one after another. Not thread-safe.

    Args:
        run_id: readable part of the folder's name; need not be unique.
        fallback_dir: used if the shared-memory file system ``root`` has no room (containers often
            give it 64 MB); must be visible to the readers.
    """

    def __init__(
        self,
        run_id: str,
        fallback_dir: Path,
        *,
        root: Path = SHARED_MEMORY_ROOT,
        pins: HostPins | None = None,
    ) -> None:
        self._roots = (root, fallback_dir)
        self._folder_name = folder_name(run_id)
        self._locks: dict[Path, int | None] = {}  # locks of the folders created so far
        self._guard: FolderGuard | None = None
        self._pins = pins or HostPins()
        self._held: dict[int, Segment] = {}  # by version, in order of publishing
        for folder in self._roots:
            remove_leftovers(folder)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that readers can open, in order of publishing."""
        return tuple(self._held)

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        keep: frozenset[int] = frozenset(),
    ) -> SharedMemoryHandle:
        """Copy whole tensors, with Hugging Face names, into shared memory as ``version``. Blocks.
        Afterwards this version, the previous one, and those in ``keep`` that were before are
        readable; all others are released before this version is written.

        Raises:
            WeightSyncError: the version cannot be published.
        """
        layout = plan_image(tensors, version)
        segment = self.begin(layout, keep)
        try:
            write_image(layout, tensors, segment.image)
            return self.finish(layout, segment)
        except BaseException:
            segment.remove()
            raise

    def begin(self, layout: ImageLayout, keep: frozenset[int]) -> Segment:
        """Return memory that no reader uses, for the next version. After writing the whole version,
        call `finish`; after an error, call the segment's `remove`. Raises WeightSyncError: there is
        no room for the version."""
        return self._used_segment(layout, keep) or self._new_segment(layout)

    def finish(self, layout: ImageLayout, segment: Segment) -> SharedMemoryHandle:
        """Make the version in ``segment`` visible. Raises WeightSyncError: the file cannot be
        renamed."""
        path = segment.path.with_suffix(".safetensors")
        try:
            segment.offer(path)
        except OSError as error:
            raise WeightSyncError(f"version {layout.version}: cannot rename to {path}") from error
        before = self._held.pop(layout.version, None)
        if before is not None and before.path != path:
            before.remove()
        self._held[layout.version] = segment
        return SharedMemoryHandle(
            version=layout.version, path=str(path), num_bytes=layout.num_bytes
        )

    def close(self) -> None:
        """Remove all versions. Readers' maps stay valid."""
        for segment in self._held.values():
            segment.remove()
        self._held.clear()
        for root in self._roots:
            shutil.rmtree(root / self._folder_name, ignore_errors=True)
        for lock in self._locks.values():
            if lock is not None:
                os.close(lock)
        self._locks.clear()
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _make(self, folder: Path) -> None:
        if self._guard is None:
            with contextlib.suppress(OSError):  # without a shell, the next command cleans up
                self._guard = FolderGuard([root / self._folder_name for root in self._roots])
        if folder not in self._locks:
            self._locks[folder] = make_folder(folder)

    def _used_segment(self, layout: ImageLayout, keep: frozenset[int]) -> Segment | None:
        """Release versions. Returns a released segment of the right size and without reader."""
        found: Segment | None = None
        for old in versions_to_free(list(self._held), keep):
            segment = self._held.pop(old)
            folder = segment.path.parent
            # Only the shared-memory file system is known to have locks.
            is_fit = segment.num_bytes == layout.num_bytes and self._roots[0] in folder.parents
            if is_fit and found is None and segment.take_back(_unfinished(folder, layout)):
                found = segment
            else:
                segment.remove()
        return found

    def _new_segment(self, layout: ImageLayout) -> Segment:
        refusals: list[str] = []
        for root in self._roots:
            refusal = _refusal(root, layout.num_bytes)
            if refusal is None:
                folder = root / self._folder_name
                try:
                    self._make(folder)
                    return Segment(_unfinished(folder, layout), layout.num_bytes, self._pins)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                        raise WeightSyncError(
                            f"version {layout.version}: cannot write {root}"
                        ) from error
                    refusal = f"{root}: {error.strerror}"
            refusals.append(refusal)
        raise WeightSyncError(
            f"version {layout.version} cannot be published: " + "; ".join(refusals)
        )


def _unfinished(folder: Path, layout: ImageLayout) -> Path:
    return folder / f"v{layout.version}.unfinished"


def _refusal(root: Path, num_bytes: int) -> str | None:
    """Return why ``root`` has no room for ``num_bytes``, or None."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(root).free - HEADROOM_BYTES
    except OSError as error:
        return f"{root}: {error.strerror}"
    if num_bytes > room:
        return f"{root}: {num_bytes >> 20} MiB needed, {max(room, 0) >> 20} MiB free"
    return None


# When a page is read, Linux also maps nearby pages that are in memory (fault_around_bytes in
# debugfs). Mapping 538 MB takes 23 ms this way, 32 ms with MADV_POPULATE_READ, 37 ms if each page
# is touched.
_FAULT_AROUND_BYTES = 64 << 10

# Bits of an entry of /proc/self/pagemap, which has a 64-bit entry for each page:
# https://docs.kernel.org/admin-guide/mm/pagemap.html
_PAGEMAP = "/proc/self/pagemap"
_IN_MEMORY_OR_SWAP = np.uint64(0b11 << 62)
_OF_A_FILE = np.uint64(1 << 61)


class Segment:
    """A publisher's file, mapped for writing. A new file is incomplete, at ``path``. Raises
    OSError: there is no room for the file."""

    def __init__(self, path: Path, num_bytes: int, pins: HostPins) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._pins = pins
        self._file = path.open("w+b")
        try:
            # Reserve the pages: writing to a mapped page without room would kill the process.
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            mapped = mmap.mmap(self._file.fileno(), num_bytes)
        except BaseException:
            self._delete()
            raise
        # The bytes, uint8 [num_bytes], which may be written until `offer`.
        self.image = torch.frombuffer(mapped, dtype=torch.uint8)
        pins.pin(self.image)

    def offer(self, path: Path) -> None:
        """Rename the complete file to its final name."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.path = self.path.replace(path)

    def take_back(self, path: Path) -> bool:
        """Rename the file, so that this process can write it again; False if a reader has locked
        it.

        It is renamed first and locked afterwards, so a reader that opened it earlier, but locks it
        later, sees that the name has changed.
        """
        try:
            self.path = self.path.replace(path)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Delete the file. Readers' maps stay valid."""
        self._pins.unpin(self.image)
        self._delete()

    def _delete(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()


class SegmentWriter:
    """Maps segments of another process, to write a part of their bytes before they are offered.
    Maps are kept as long as their files exist, because mapping takes as long as the copy."""

    def __init__(self, pins: HostPins | None = None) -> None:
        self._pins = pins or HostPins()
        self._mapped: dict[int, tuple[BinaryIO, torch.Tensor]] = {}  # by inode

    def image(self, path: Path) -> torch.Tensor:
        """Return all bytes of a segment, uint8 [num_bytes], for writing in place. Raises OSError:
        ``path`` does not exist."""
        for inode, (file, image) in list(self._mapped.items()):
            if not _has_name(file):
                self._pins.unpin(image)
                file.close()
                del self._mapped[inode]
        inode = path.stat().st_ino
        if inode not in self._mapped:
            file = path.open("r+b")
            mapped = mmap.mmap(file.fileno(), 0)
            self._mapped[inode] = file, torch.frombuffer(mapped, dtype=torch.uint8)
            self._pins.pin(self._mapped[inode][1])
        return self._mapped[inode][1]


class SegmentReader:
    """Maps published segments for reading. All methods may be called from any thread.

    Maps are kept as long as their files exist. The memory of a removed version is freed when
    `examine` runs and none of the version's tensors exists any more.
    """

    def __init__(self, pins: HostPins | None = None) -> None:
        self._pins = pins or HostPins()
        self._lock = threading.Lock()
        self._idle: dict[int, _Map] = {}  # reusable maps, by inode
        self._unused: deque[_Map] = deque()  # maps without a tensor, not yet examined

    def image(self, path: Path) -> torch.Tensor:
        """Return all bytes of a published file, uint8. The file is locked while the tensor or a
        view of it exists. All pages are mapped, so that later reads cause no page fault. Writing to
        the tensor changes only this reader's copy.

        Raises:
            OSError: the file is gone, or will be written again.
            ValueError: the file is empty.
        """
        self.examine()
        with self._lock:
            found = self._idle.pop(path.stat().st_ino, None)
        found = found or _Map(path, is_shared=self._pins.are_used)
        try:
            found.flock(fcntl.LOCK_SH | fcntl.LOCK_NB)
            if path.stat().st_ino != found.inode:
                raise FileNotFoundError(f"{path} was replaced")
            self._pins.pin(found.image)
        except BaseException:
            self._pins.unpin(found.image)
            raise
        held = memoryview(found.memory)  # held by the tensor's storage, which views share
        image = torch.frombuffer(held, dtype=torch.uint8)
        weakref.finalize(held, self._release, found).atexit = False
        image[::_FAULT_AROUND_BYTES].sum()
        return image

    def examine(self) -> int:
        """Find the unused maps that can be reused, and drop the others. Returns the number of
        reusable maps. `image` does this too, but then its caller waits for a third of the time that
        mapping takes."""
        with self._lock:
            while self._unused:
                found = self._unused.popleft()
                if found.inode not in self._idle and found.is_as_published():
                    self._idle[found.inode] = found
                else:
                    self._pins.unpin(found.image)
            for inode, idle in list(self._idle.items()):
                if not _has_name(idle.file):
                    self._pins.unpin(self._idle.pop(inode).image)
            return len(self._idle)

    def _release(self, unused: _Map) -> None:
        """Mark a map as unused, because its last tensor is gone. Runs in any thread, at any moment,
        and therefore takes no lock."""
        unused.flock(fcntl.LOCK_UN)
        self._unused.append(unused)


class _Map:
    """A map of a file: private and copied on write, or shared. Locks belong to the open file."""

    def __init__(self, path: Path, *, is_shared: bool) -> None:
        self.file: BinaryIO = path.open("r+b" if is_shared else "rb")
        access = mmap.ACCESS_WRITE if is_shared else mmap.ACCESS_COPY
        self.memory = mmap.mmap(self.file.fileno(), 0, access=access)
        self.inode = os.fstat(self.file.fileno()).st_ino
        self.image = torch.frombuffer(self.memory, dtype=torch.uint8)

    def flock(self, operation: int) -> None:
        """Lock or unlock the file. No effect on file systems without locks; there the publisher
        does not reuse files."""
        try:
            fcntl.flock(self.file, operation)
        except OSError as error:
            if error.errno not in NO_FILE_LOCKS:
                raise

    def is_as_published(self) -> bool:
        """Whether no page was written to by this process; False if the kernel does not tell."""
        page = mmap.PAGESIZE
        num_pages = -(-len(self.memory) // page)
        try:
            with open(_PAGEMAP, "rb", buffering=0) as file:
                file.seek(self.image.data_ptr() // page * 8)
                content = file.read(num_pages * 8)
        except OSError:
            return False
        entries = np.frombuffer(content, dtype=np.uint64)
        is_own = ((entries & _IN_MEMORY_OR_SWAP) != 0) & ((entries & _OF_A_FILE) == 0)
        return len(entries) == num_pages and not is_own.any()


def _has_name(file: BinaryIO) -> bool:
    return os.fstat(file.fileno()).st_nlink > 0


class WeightStaging:
    """The versions that a generator rank has mapped and not yet copied into its model.

    A thread maps a version, and pins it for CUDA, while decoding continues; the swap, between two
    steps, only copies it. All methods may be called from any thread. The tensors of a discarded
    version stay valid, because they keep the memory alive.
    """

    def __init__(self, pins: HostPins | None = None) -> None:
        self._lock = threading.Lock()
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._segments = SegmentReader(pins)

    @property
    def versions(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._staged))

    def stage(self, handle: SharedMemoryHandle) -> None:
        """Map a version, unless it is already staged. Blocks. Raises WeightSyncError: the file is
        gone, incomplete, or has another version than the handle."""
        if handle.version in self.versions:
            return
        try:
            image = self._segments.image(Path(handle.path))
        except (OSError, ValueError) as error:
            raise WeightSyncError(f"version {handle.version}: cannot map {handle.path}") from error
        if image.numel() != handle.num_bytes:
            raise WeightSyncError(
                f"version {handle.version}: {handle.path} has {image.numel()} bytes "
                f"instead of {handle.num_bytes}"
            )
        tensors = read_image(image, handle.version)
        with self._lock:
            self._staged.setdefault(handle.version, tensors)

    def tensors(self, version: int) -> Mapping[str, torch.Tensor]:
        """Return the tensors of ``version`` by Hugging Face name, for reading only. Raises
        WeightSyncError: ``version`` is not staged."""
        with self._lock:
            if version in self._staged:
                return dict(self._staged[version])
            staged = sorted(self._staged)
        raise WeightSyncError(f"version {version} is not staged; staged are {staged or 'none'}")

    def discard_before(self, version: int) -> None:
        with self._lock:
            discarded = [staged for staged in self._staged if staged < version]
            for old in discarded:
                del self._staged[old]
        if discarded:  # examine now, during decoding, instead of before the next fetch
            examination = threading.Thread(target=self._segments.examine, daemon=True)
            examination.start()
