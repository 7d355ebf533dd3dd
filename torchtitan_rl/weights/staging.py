"""Weights that a generator rank has fetched and not yet copied into its model.

A thread fetches them while decoding goes on; the swap, between two steps, only copies. All methods
may be called from any thread.

Invariants: a version is available only after all of its bytes are fetched; its tensors stay valid
after it was discarded, since they hold the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.handle import RemoteMemoryHandle, SharedMemoryHandle, WeightHandle
from torchtitan_rl.weights.image import read_image
from torchtitan_rl.weights.segment import SegmentReader


class RdmaReader(Protocol):
    """Reads the remote bytes into ``image``, uint8 [handle.num_bytes]; blocks.

    Raises:
        WeightSyncError: they could not be read.
    """

    def __call__(self, handle: RemoteMemoryHandle, image: torch.Tensor, /) -> None: ...


class WeightStaging:
    """Staged versions of one rank. ``rdma_reader`` is needed for remote handles."""

    def __init__(self, rdma_reader: RdmaReader | None = None) -> None:
        self._rdma_reader = rdma_reader
        self._lock = threading.Lock()
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._segments = SegmentReader()
        # Memory of the remote image released last, reused for the next one: allocating it costs
        # about as much as reading into it. No tensor uses it.
        self._spare: deque[mmap.mmap] = deque(maxlen=1)

    @property
    def versions(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._staged))

    def stage(self, handle: WeightHandle) -> None:
        """Fetch a version, unless it is already staged; blocks.

        Raises:
            WeightSyncError: it is gone, incomplete, or not the handle's version.
        """
        if handle.version in self.versions:
            return
        if isinstance(handle, SharedMemoryHandle):
            image = self._map_file(handle)
        else:
            image = self._read_remote(handle)
        tensors = read_image(image, handle.version)
        with self._lock:
            self._staged.setdefault(handle.version, tensors)

    def _map_file(self, handle: SharedMemoryHandle) -> torch.Tensor:
        try:
            image = self._segments.image(Path(handle.path))
        except (OSError, ValueError) as error:
            raise WeightSyncError(f"version {handle.version}: cannot map {handle.path}") from error
        if image.numel() != handle.num_bytes:
            raise WeightSyncError(
                f"version {handle.version}: {handle.path} has {image.numel()} bytes "
                f"instead of {handle.num_bytes}"
            )
        return image

    def _read_remote(self, handle: RemoteMemoryHandle) -> torch.Tensor:
        if self._rdma_reader is None:
            raise WeightSyncError(
                f"version {handle.version} is in remote memory and this rank has no RDMA reader"
            )
        memory = self._memory(handle.num_bytes)
        held = memoryview(memory)  # by the tensor's storage, which views share
        image = torch.frombuffer(held, dtype=torch.uint8)
        self._rdma_reader(handle, image)
        # Not reused after a failure, since a late read may still write to it.
        weakref.finalize(held, self._spare.append, memory).atexit = False
        return image

    def _memory(self, num_bytes: int) -> mmap.mmap:
        with contextlib.suppress(IndexError):
            memory = self._spare.pop()
            if len(memory) == num_bytes:
                return memory
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def tensors(self, version: int) -> Mapping[str, torch.Tensor]:
        """The tensors of ``version`` in Hugging Face names, for reading.

        Raises:
            WeightSyncError: it is not staged.
        """
        with self._lock:
            if version in self._staged:
                return dict(self._staged[version])
            staged = sorted(self._staged)
        raise WeightSyncError(f"version {version} is not staged; staged are {staged or 'none'}")

    def discard_before(self, version: int) -> None:
        """Drop all versions older than ``version``."""
        with self._lock:
            discarded = [staged for staged in self._staged if staged < version]
            for old in discarded:
                del self._staged[old]
        if discarded:  # examined now, during decoding, rather than before the next fetch
            examination = threading.Thread(target=self._segments.examine, daemon=True)
            examination.start()
