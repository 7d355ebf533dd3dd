"""Weights that a generator rank has mapped and not yet copied into its model.

A thread maps them while decoding continues; the swap, between two steps, only copies. All methods
may be called from any thread.

Invariants: a version is available only after all of its bytes are mapped; its tensors stay valid
after it was discarded, since they hold the memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.handle import SharedMemoryHandle
from torchtitan_rl.weights.image import read_image
from torchtitan_rl.weights.shm import SegmentReader


class WeightStaging:
    """Staged versions of one rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._segments = SegmentReader()

    @property
    def versions(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._staged))

    def stage(self, handle: SharedMemoryHandle) -> None:
        """Map a version, unless it is already staged; blocks.

        Raises:
            WeightSyncError: the file is gone, incomplete, or not of the handle's version.
        """
        if handle.version in self.versions:
            return
        tensors = read_image(self._map_file(handle), handle.version)
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

    def tensors(self, version: int) -> Mapping[str, torch.Tensor]:
        """The tensors of ``version`` in Hugging Face names, for reading.

        Raises:
            WeightSyncError: ``version`` is not staged.
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
