"""References to published weights, sent in messages instead of the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryHandle:
    """A safetensors file with Hugging Face names, memory-mapped by processes of the same host."""

    version: int
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMemoryHandle:
    """The same bytes in the publisher's memory, read through Monarch's ``RDMABuffer``."""

    version: int
    buffer: Any  # monarch.rdma.RDMABuffer over the whole safetensors image, uint8 [num_bytes]
    num_bytes: int


WeightHandle = SharedMemoryHandle | RemoteMemoryHandle
