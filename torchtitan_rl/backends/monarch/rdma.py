"""Weights from one process's memory to another's by Monarch's ``RDMABuffer``, without files.

Where no RDMA hardware is found, Monarch moves the bytes over its own channels, which are encrypted
where the run's are. Both classes block: call them from threads, not from an actor's event loop. The
thread needs a copy of the endpoint's context (`asyncio.to_thread` makes one), since Monarch finds
the actor to act for in a context variable.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import monarch
import torch
from monarch.rdma import RDMABuffer, get_rdma_backend

from torchtitan_rl.errors import WeightSyncError


def has_rdma_hardware() -> bool:
    return get_rdma_backend() == "ibverbs"


class RdmaOffers:
    """See `MemoryOffers`."""

    def __init__(self) -> None:
        _configure()

    def offer(self, memory: torch.Tensor) -> tuple[RDMABuffer, ...]:
        try:
            return (RDMABuffer(memory),)
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
        start = 0
        for buffer in buffers:
            end = start + buffer.size()
            try:
                buffer.read_into(memory[start:end], timeout=self._timeout_s).get()
            except Exception as error:  # Monarch raises a plain Exception here
                raise WeightSyncError(f"weights could not be read: {error}") from error
            start = end


def _configure() -> None:
    monarch.configure(rdma_allow_tcp_fallback=True)
    warnings.filterwarnings("ignore", message="No ibverbs RDMA hardware")
