"""Transfers weights from one process's memory to another's with Monarch's ``RDMABuffer``, without
files.

Without RDMA hardware, Monarch sends the bytes over its own channels, which are encrypted if the
run's channels are. Both classes block: call them from threads, not from an actor's event loop. The
thread needs a copy of the endpoint's context (`asyncio.to_thread` makes one), because Monarch finds
the current actor in a context variable.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import monarch
import torch
from monarch.rdma import RDMABuffer

from torchtitan_rl.errors import WeightSyncError

# Without RDMA hardware, Monarch requests the chunks of a buffer one after another, and each chunk
# passes through the processes of both hosts. Reading several slices at the same time keeps all
# these processes busy: 256 MB take 0.33 s instead of 0.50 s on two cores. With chunks of 64 MB,
# Monarch's default, a read takes 1.3 times as long.
_NUM_SLICES = 8
_LEAST_SLICE_BYTES = 4 << 20
_CHUNK_MB = 8


class RdmaOffers:
    """See `MemoryOffers`."""

    def __init__(self) -> None:
        _configure()

    def offer(self, memory: torch.Tensor) -> tuple[RDMABuffer, ...]:
        size = max(_LEAST_SLICE_BYTES, -(-memory.numel() // _NUM_SLICES))
        try:
            return tuple(RDMABuffer(one) for one in torch.split(memory, size))
        except RuntimeError as error:
            raise WeightSyncError(f"no RDMABuffer could be made: {error}") from error

    def withdraw(self, buffers: Sequence[RDMABuffer]) -> None:
        for buffer in buffers:
            buffer.drop().get()


class RdmaReader:
    """See `BufferReader`."""

    def __init__(self, *, timeout_s: float) -> None:
        _configure()
        self._timeout_s = max(1, round(timeout_s))

    def __call__(self, buffers: Sequence[RDMABuffer], memory: torch.Tensor) -> None:
        places = torch.split(memory, [buffer.size() for buffer in buffers])
        reads = [
            buffer.read_into(place, timeout=self._timeout_s)
            for buffer, place in zip(buffers, places, strict=True)
        ]
        errors = []
        for read in reads:  # wait for all, because a late read would write into reused memory
            try:
                read.get()
            except Exception as error:  # Monarch raises a plain Exception here
                errors.append(error)
        if errors:
            raise WeightSyncError(f"weights could not be read: {errors[0]}") from errors[0]


def _configure() -> None:
    monarch.configure(rdma_allow_tcp_fallback=True, rdma_max_chunk_size_mb=_CHUNK_MB)
    warnings.filterwarnings("ignore", message="No ibverbs RDMA hardware")
