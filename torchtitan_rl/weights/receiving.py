"""Versions of the trainer's weights in this host's shared memory, fetched once for all replicas.

A fetch reads the packed parts of every source, compares checksums and assembles the image. A part
that arrives damaged is read once more. The finished image can be offered to further hosts.

Invariants: a version has its final name only after every byte of every tensor was verified; the
memory of a version that is offered is not written to again before the offer is withdrawn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass

import torch

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.handle import Fetched, RemoteMemoryHandle, RemoteSource
from torchtitan_rl.weights.image import ImageLayout, write_header
from torchtitan_rl.weights.parts import (
    PackedPart,
    checksum,
    contents,
    damaged,
    start_in_image,
    unpack,
)
from torchtitan_rl.weights.remote import BufferReader, MemoryOffers
from torchtitan_rl.weights.shared_memory import SharedMemoryPublisher

_READS_AT_ONCE = 8  # sources; each takes memory for its packed bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    layout: ImageLayout
    sources: tuple[RemoteSource, ...]  # what was fetched, with checksums
    image: torch.Tensor


class WeightReceiver:
    """The versions of one host. Not thread-safe.

    Args:
        host: what errors call this host.
    """

    def __init__(
        self,
        shared: SharedMemoryPublisher,
        read: BufferReader,
        offers: MemoryOffers,
        *,
        host: str,
    ) -> None:
        self._shared = shared
        self._read = read
        self._offers = offers
        self._host = host
        self._held: dict[int, _Version] = {}
        self._offered: dict[int, RemoteSource] = {}
        # Memory for packed bytes, reused: allocating it costs as much as reading into it.
        self._spare: deque[torch.Tensor] = deque()

    def fetch(self, handle: RemoteMemoryHandle, parent: RemoteSource | None) -> Fetched:
        """Read a version from the trainer's ranks, or from ``parent``, a host that has all of it.

        Raises:
            WeightSyncError: it is gone, incomplete or damaged, or there is no room.
        """
        started = time.perf_counter()
        layout, sources = handle.layout, handle.sources if parent is None else (parent,)
        _check_complete(layout, sources)
        segment = self._shared.begin(layout, handle.keep)
        try:
            self._forget_removed()
            write_header(layout, segment.image)
            num_bytes = self._receive_all(layout, sources, segment.image)
            shared = self._shared.finish(layout, segment)
        except BaseException:
            segment.remove()
            raise
        self._held[layout.version] = _Version(layout=layout, sources=sources, image=segment.image)
        seconds = time.perf_counter() - started
        return Fetched(handle=shared, num_bytes=num_bytes, seconds=seconds)

    def offer(self, version: int) -> RemoteSource:
        """All of a version that was fetched, for other hosts to read from here.

        Raises:
            WeightSyncError: it is not here, or cannot be opened.
        """
        if version not in self._offered:
            held = self._held.get(version)
            if held is None:
                raise WeightSyncError(f"version {version} is not on {self._host} any more")
            content = held.image[len(held.layout.header) :]
            self._offered[version] = RemoteSource(
                owner=self._host,
                parts=_whole_tensors(held, content),
                buffers=self._offers.offer(content),
                num_bytes=content.numel(),
            )
        return self._offered[version]

    def close(self) -> None:
        """Withdraw and remove all versions. Readers on this host keep what they have mapped."""
        for source in self._offered.values():
            self._offers.withdraw(source.buffers)
        self._offered.clear()
        self._held.clear()
        self._shared.close()

    def _forget_removed(self) -> None:
        """Of versions whose memory is about to be written again, or gone."""
        for version in set(self._held) - set(self._shared.versions):
            del self._held[version]
            offered = self._offered.pop(version, None)
            if offered is not None:
                self._offers.withdraw(offered.buffers)

    def _receive_all(
        self, layout: ImageLayout, sources: Sequence[RemoteSource], image: torch.Tensor
    ) -> int:
        """Returns the number of bytes that were read."""
        # Monarch finds the actor to act for in a context variable.
        with ThreadPoolExecutor(min(len(sources), _READS_AT_ONCE)) as threads:
            reads = [
                threads.submit(copy_context().run, self._receive, layout, source, image)
                for source in sources
            ]
            return sum(read.result() for read in reads)

    def _receive(self, layout: ImageLayout, source: RemoteSource, image: torch.Tensor) -> int:
        boxes = [part.box for part in source.parts]
        start = start_in_image(boxes, layout)
        if start is None:
            packed = self._memory(source.num_bytes)
        else:
            packed = image[start : start + source.num_bytes]
        num_bytes = packed.numel()
        self._read(source.buffers, packed)
        if damaged(source.parts, packed):
            num_bytes += packed.numel()
            self._read(source.buffers, packed)
            names = damaged(source.parts, packed)
            if names:
                raise WeightSyncError(
                    f"version {layout.version}: {_listed(names)} arrived damaged twice at "
                    f"{self._host} from {source.owner}: the checksums differ"
                )
        if start is None:
            unpack(boxes, layout, packed, image)
            self._spare.append(packed)  # not after a failure
        return num_bytes

    def _memory(self, num_bytes: int) -> torch.Tensor:
        with suppress(IndexError):  # called by several threads
            while (spare := self._spare.popleft()).numel() != num_bytes:
                pass
            return spare
        return torch.empty(num_bytes, dtype=torch.uint8)


def _check_complete(layout: ImageLayout, sources: Sequence[RemoteSource]) -> None:
    num_bytes = sum(part.box.num_bytes for source in sources for part in source.parts)
    if num_bytes != layout.num_bytes - len(layout.header):
        raise WeightSyncError(
            f"version {layout.version}: the trainer offers {num_bytes} bytes of "
            f"{layout.num_bytes - len(layout.header)}"
        )


def _whole_tensors(held: _Version, content: torch.Tensor) -> tuple[PackedPart, ...]:
    """Each tensor of an image as one part, in their order; ``content`` is without the header."""
    by_name = {part.box.name: part for source in held.sources for part in source.parts}
    whole = [
        box._replace(offset=(0,) * len(box.shape), size=box.shape)
        for box in (by_name[name].box for name in held.layout.offsets if name in by_name)
    ]
    return tuple(
        by_name[box.name] if by_name[box.name].box == box else PackedPart(box, checksum(place))
        for box, place in contents(whole, content)
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
