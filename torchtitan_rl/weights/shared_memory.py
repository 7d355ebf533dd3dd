"""Each version of the weights as a safetensors file in shared memory, for readers on the same host.

Plain files instead of ``multiprocessing.SharedMemory``, whose tracker unlinks a block when another
process ends.

Invariants: a file has its final name only after it is complete; while a version is written, only
the current version and those in ``keep`` exist besides it; a released version that no reader uses
provides the memory (see `weights/segment.py`); the folder is removed when its process ends (see
`weights/leftovers.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.handle import SharedMemoryHandle, versions_to_free
from torchtitan_rl.weights.image import ImageLayout, plan_image, write_image
from torchtitan_rl.weights.leftovers import (
    HEADROOM_BYTES,
    SHARED_MEMORY_ROOT,
    FolderGuard,
    folder_name,
    make_folder,
    remove_leftovers,
)
from torchtitan_rl.weights.segment import Segment


class SharedMemoryPublisher:
    """Writes versions one after another; a `WeightPublisher`. Not thread-safe.

    Args:
        run_id: part of the folder's name, for people; need not be unique.
        fallback_dir: folder to use if the shared-memory file system has no room (containers often
            give it 64 MB); must be visible to the readers, as the run's folder is.
        root: the shared-memory file system.
    """

    def __init__(self, run_id: str, fallback_dir: Path, *, root: Path = SHARED_MEMORY_ROOT) -> None:
        self._roots = (root, fallback_dir)
        self._folder_name = folder_name(run_id)
        self._locks: dict[Path, int | None] = {}  # of the folders created so far
        self._guard: FolderGuard | None = None
        self._held: dict[int, Segment] = {}  # by version, in order of publishing
        for folder in self._roots:
            remove_leftovers(folder)

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that readers can open, in order of publishing."""
        return tuple(self._held)

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        keep: frozenset[int] = frozenset(),
    ) -> SharedMemoryHandle:
        """See `WeightPublisher.publish`."""
        layout = plan_image(tensors, version)
        segment = self.begin(layout, keep)
        try:
            write_image(layout, tensors, segment.image)
            return self.finish(layout, segment)
        except BaseException:
            segment.remove()
            raise

    def begin(self, layout: ImageLayout, keep: frozenset[int]) -> Segment:
        """First half of `publish`: memory for the version that no reader uses. After writing all of
        it call `finish`, or after an error the segment's `remove`.

        Raises:
            WeightSyncError: there is no room.
        """
        return self._used_segment(layout, keep) or self._new_segment(layout)

    def finish(self, layout: ImageLayout, segment: Segment) -> SharedMemoryHandle:
        """Make the version visible that was written into ``segment``.

        Raises:
            WeightSyncError: the file cannot be renamed.
        """
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
        """Remove all versions. Readers keep what they have mapped."""
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
            with contextlib.suppress(OSError):  # if there is no shell, the next command cleans up
                self._guard = FolderGuard([root / self._folder_name for root in self._roots])
        if folder not in self._locks:
            self._locks[folder] = make_folder(folder)

    def _used_segment(self, layout: ImageLayout, keep: frozenset[int]) -> Segment | None:
        """Release versions; returns one whose memory fits and that no reader uses."""
        found: Segment | None = None
        for old in versions_to_free(list(self._held), keep):
            segment = self._held.pop(old)
            folder = segment.path.parent
            # Only the shared-memory file system certainly has locks.
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
                    return Segment(_unfinished(folder, layout), layout.num_bytes)
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
    """Why ``root`` cannot take ``num_bytes``, or None."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(root).free - HEADROOM_BYTES
    except OSError as error:
        return f"{root}: {error.strerror}"
    if num_bytes > room:
        return f"{root}: {num_bytes >> 20} MiB needed, {max(room, 0) >> 20} MiB free"
    return None
