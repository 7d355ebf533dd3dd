"""Parts of versions in this process's memory, readable by other hosts.

Invariants: memory of a version is never written to again; the newest version and those to be kept
are readable when one more is published, and no more; a version that could not be packed is not
readable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from torchtitan_rl.weights.handle import RemoteSource, versions_to_free
from torchtitan_rl.weights.image import TensorPart
from torchtitan_rl.weights.parts import boxes_of, pack


class MemoryOffers(Protocol):
    """Opens memory of this process to readers elsewhere. Both methods block."""

    def offer(self, memory: torch.Tensor, /) -> tuple[Any, ...]:
        """Buffers over consecutive slices of ``memory``, uint8, which they keep alive.

        Raises:
            WeightSyncError: it cannot be opened.
        """
        ...

    def withdraw(self, buffers: Sequence[Any], /) -> None: ...


class BufferReader(Protocol):
    """Reads the buffers, one after another, into ``memory``, uint8 of their size; blocks.

    Raises:
        WeightSyncError: they could not be read.
    """

    def __call__(self, buffers: Sequence[Any], memory: torch.Tensor, /) -> None: ...


class PartPublisher:
    """Packs and offers one process's parts of one version after another. Not thread-safe.

    Args:
        owner: what errors of readers call this process.
    """

    def __init__(self, offers: MemoryOffers, *, owner: str) -> None:
        self._offers = offers
        self._owner = owner
        self._held: dict[int, RemoteSource] = {}  # by version, in order of publishing

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._held)

    def publish(
        self, version: int, parts: Mapping[str, TensorPart], *, keep: frozenset[int]
    ) -> RemoteSource | None:
        """Copy the local parts; None if this process has none.

        Raises:
            WeightSyncError: they cannot be offered.
        """
        self._release([version, *versions_to_free(list(self._held), keep)])
        boxes = boxes_of(parts)
        if not boxes:
            return None
        packed = torch.empty(sum(box.num_bytes for box in boxes), dtype=torch.uint8)
        table = pack(boxes, parts, packed)
        source = RemoteSource(
            owner=self._owner,
            parts=table,
            buffers=self._offers.offer(packed),
            num_bytes=packed.numel(),
        )
        self._held[version] = source
        return source

    def close(self) -> None:
        self._release(list(self._held))

    def _release(self, versions: list[int]) -> None:
        for version in versions:
            if (source := self._held.pop(version, None)) is not None:
                self._offers.withdraw(source.buffers)
