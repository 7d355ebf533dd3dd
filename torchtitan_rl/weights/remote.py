"""Parts of versions in this process's memory, readable by other hosts.

Invariants: memory of a version is never written to again; the newest version and those to be kept
are readable when one more is published, and no more; a version that could not be packed is not
readable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchtitan_rl.weights import delta
from torchtitan_rl.weights.handle import RemoteDelta, RemoteSource, versions_to_free
from torchtitan_rl.weights.image import Box, TensorPart
from torchtitan_rl.weights.parts import boxes_of, pack

_WORTHWHILE = 0.6  # of the bytes: encoding and decoding take time, too
_RETRY_AFTER = 8  # versions, where a delta was not worthwhile


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    boxes: tuple[Box, ...]
    packed: torch.Tensor
    source: RemoteSource


class PartPublisher:
    """Packs and offers one process's parts of one version after another. Not thread-safe.

    Args:
        owner: what errors of readers call this process.
        makes_deltas: also offer what changed since the version before, where that is small.
    """

    def __init__(self, offers: MemoryOffers, *, owner: str, makes_deltas: bool) -> None:
        self._offers = offers
        self._owner = owner
        self._makes_deltas = makes_deltas
        self._no_delta_before = 0  # version
        self._held: dict[int, _Held] = {}  # by version, in order of publishing

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
            delta=self._delta(version, boxes, packed),
        )
        self._held[version] = _Held(boxes=boxes, packed=packed, source=source)
        return source

    def close(self) -> None:
        self._release(list(self._held))

    def _delta(
        self, version: int, boxes: tuple[Box, ...], packed: torch.Tensor
    ) -> RemoteDelta | None:
        if not self._makes_deltas or not self._held or version < self._no_delta_before:
            return None
        base, before = list(self._held.items())[-1]
        if before.boxes != boxes:
            return None
        old, new, itemsize = before.packed.numpy(), packed.numpy(), boxes[0].dtype.itemsize
        if delta.sampled_share(old, new, itemsize=itemsize) > _WORTHWHILE:
            self._no_delta_before = version + _RETRY_AFTER
            return None
        blocks = delta.encode(old, new, itemsize=itemsize)
        content = torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8)
        return RemoteDelta(
            base=base, buffers=self._offers.offer(content), sizes=tuple(map(len, blocks))
        )

    def _release(self, versions: list[int]) -> None:
        for version in versions:
            held = self._held.pop(version, None)
            if held is not None:
                self._offers.withdraw(held.source.buffers)
                if held.source.delta is not None:
                    self._offers.withdraw(held.source.delta.buffers)
