"""Weights from one actor's memory to another's by Monarch's ``RDMABuffer``, without files.

Where no RDMA hardware is found Monarch moves the bytes over TCP (no authentication: for private
networks). Both classes block: call them from threads, not from an actor's event loop. The thread
needs a copy of the endpoint's context (`asyncio.to_thread` makes one), since Monarch finds the
actor to act for in a context variable.

Invariants: memory of a version is never written to again; the current version, the
one before and those to be kept are held, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping

import monarch
import torch
from monarch.rdma import RDMABuffer

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.handle import RemoteMemoryHandle
from torchtitan_rl.weights.image import plan_image, write_image
from torchtitan_rl.weights.published import versions_to_free


class MonarchRdmaPublisher:
    """Holds the images of versions, readable by other actors."""

    def __init__(self) -> None:
        monarch.configure(rdma_allow_tcp_fallback=True)
        self._held: dict[int, tuple[torch.Tensor, RDMABuffer]] = {}

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        keep: frozenset[int] = frozenset(),
    ) -> RemoteMemoryHandle:
        """Copy the tensors into an image and open it to remote readers. First, all versions but
        the current one and those in ``keep`` go.

        Raises:
            WeightSyncError: a tensor has no place in an image, or Monarch refused the buffer.
        """
        self._release([version, *versions_to_free(list(self._held), keep)])
        layout = plan_image(tensors, version)
        image = torch.empty(layout.num_bytes, dtype=torch.uint8)
        write_image(layout, tensors, image)
        try:
            buffer = RDMABuffer(image)
        except RuntimeError as error:
            raise WeightSyncError(f"version {version}: no RDMABuffer could be made") from error
        self._held[version] = (image, buffer)
        return RemoteMemoryHandle(version=version, buffer=buffer, num_bytes=layout.num_bytes)

    def close(self) -> None:
        self._release(list(self._held))

    def _release(self, versions: list[int]) -> None:
        for version in versions:
            if version in self._held:
                _, buffer = self._held.pop(version)
                buffer.drop().get()


class MonarchRdmaReader:
    """Fills memory of this process from a publisher's; an `RdmaReader`."""

    def __init__(self, *, timeout_s: float) -> None:
        monarch.configure(rdma_allow_tcp_fallback=True)
        self._timeout_s = max(1, round(timeout_s))

    def __call__(self, handle: RemoteMemoryHandle, image: torch.Tensor) -> None:
        """Blocks until ``image``, uint8 [handle.num_bytes], is whole.

        Raises:
            WeightSyncError: the publisher gave the version up or died, or time ran out.
        """
        try:
            handle.buffer.read_into(image, timeout=self._timeout_s).get()
        except Exception as error:  # Monarch raises a plain Exception here
            raise WeightSyncError(f"version {handle.version} could not be read: {error}") from error
