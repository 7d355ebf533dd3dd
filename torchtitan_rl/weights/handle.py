"""References to published weights, which are sent in messages instead of the bytes. Also decides
which published versions a publisher keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_rl.weights.image import ImageLayout, PackedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryHandle:
    """A safetensors file with Hugging Face names, memory-mapped by processes of the same host."""

    version: int
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSource:
    """The packed parts of a version in the memory of one process (see `weights/remote.py`)."""

    owner: str  # the process's name in errors: "trainer rank 1", "host 2"
    parts: tuple[PackedPart, ...]
    buffers: tuple[Any, ...]  # monarch.rdma.RDMABuffer, over slices of the packed bytes, in order
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMemoryHandle:
    """The parts of a version in the memory of the trainer's ranks. Together they are the whole
    version.

    ``keep``: versions that are still needed, besides this version and the previous one. ``shared``:
    the same version in shared memory, if there are replicas on the trainer's host.
    """

    layout: ImageLayout
    sources: tuple[RemoteSource, ...]
    keep: frozenset[int] = frozenset()
    shared: SharedMemoryHandle | None = None

    @property
    def version(self) -> int:
        return self.layout.version

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version in a host's shared memory. ``num_bytes``: number of bytes read from other hosts for
    it."""

    handle: SharedMemoryHandle
    num_bytes: int
    seconds: float


WeightHandle = SharedMemoryHandle | RemoteMemoryHandle


def versions_to_free(held: list[int], keep: frozenset[int]) -> list[int]:
    """Return which of the versions ``held`` (oldest first) to release before another version is
    published: all but the newest and those in ``keep``.

    >>> versions_to_free([3, 4, 5], keep=frozenset({3}))
    [4]
    """
    return [version for version in held[:-1] if version not in keep]
