"""Transfers weights between hosts: one process offers parts of a version in its memory, and others
read and assemble them.

Each trainer rank packs the parts of tensors that it holds into one block of bytes, with a checksum
for each part; nothing is gathered. A receiver reads the blocks of all ranks, compares the checksums
(a damaged block is read once more), and copies each part to its place in an image in its host's
shared memory. The finished image can be offered to further hosts.

Invariants
- Packed parts start at multiples of their item size, largest item size first.
- When another version is published, only the newest earlier version and the versions to keep stay
  readable. The memory of the others is packed again under the same offer, because registering it
  with RDMA hardware takes long; a late reader sees other checksums. A version that could not be
  packed is not readable.
- A version has its final name only after every byte of every tensor was verified.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.distribution import (
    Fetched,
    RemoteMemoryHandle,
    RemoteSource,
    versions_to_free,
)
from torchtitan_rl.weights.image import (
    Box,
    ImageLayout,
    PackedPart,
    TensorPart,
    view_of,
    write_header,
)
from torchtitan_rl.weights.pinning import HostPins
from torchtitan_rl.weights.shm import SharedMemoryPublisher


class MemoryOffers(Protocol):
    """Makes memory of this process readable for other processes. Both methods block."""

    def offer(self, memory: torch.Tensor, /) -> tuple[Any, ...]:
        """Return buffers over consecutive slices of ``memory``, uint8. The buffers keep the memory
        alive. Raises WeightSyncError: the memory cannot be made readable."""

    def withdraw(self, buffers: Sequence[Any], /) -> None: ...


BufferReader = Callable[[Sequence[Any], torch.Tensor], None]
"""Reads buffers into consecutive slices of memory, uint8 of their total size. Blocks. Raises
WeightSyncError if they could not be read."""


class PartPublisher:
    """Packs and offers one process's parts of one version after another. Not thread-safe. ``owner``
    is this process's name in readers' errors."""

    def __init__(self, offers: MemoryOffers, *, owner: str, pins: HostPins | None = None) -> None:
        self._offers = offers
        self._owner = owner
        self._pins = pins or HostPins()
        self._held: dict[int, _Offered] = {}  # by version, in order of publishing
        self._spare: list[_Offered] = []  # memory of released versions

    def publish(
        self, version: int, parts: Mapping[str, TensorPart], *, keep: frozenset[int]
    ) -> RemoteSource | None:
        """Copy and offer the local parts. Returns None if this process has none. Raises
        WeightSyncError: the parts cannot be offered."""
        self._release([version, *versions_to_free(list(self._held), keep)])
        boxes = boxes_of(parts)
        if not boxes:
            return None
        offered = self._memory(sum(box.num_bytes for box in boxes))
        try:
            packed = pack(boxes, parts, offered.memory)
        except BaseException:
            self._spare.append(offered)
            raise
        self._held[version] = offered
        return RemoteSource(
            owner=self._owner,
            parts=packed,
            buffers=offered.buffers,
            num_bytes=offered.memory.numel(),
        )

    def close(self) -> None:
        self._release(list(self._held))
        self._forget_spare()

    def _release(self, versions: list[int]) -> None:
        for version in versions:
            if (offered := self._held.pop(version, None)) is not None:
                self._spare.append(offered)

    def _memory(self, num_bytes: int) -> _Offered:
        if self._spare and self._spare[-1].memory.numel() == num_bytes:
            return self._spare.pop()
        self._forget_spare()  # of other sizes
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._pins.pin(memory)
        try:
            return _Offered(memory, self._offers.offer(memory))
        except BaseException:
            self._pins.unpin(memory)
            raise

    def _forget_spare(self) -> None:
        for offered in self._spare:
            self._offers.withdraw(offered.buffers)
            self._pins.unpin(offered.memory)
        self._spare.clear()


class _Offered(NamedTuple):
    memory: torch.Tensor  # packed bytes of one version after another
    buffers: tuple[Any, ...]  # over slices of the memory


def checksum(content: torch.Tensor) -> int:
    """Compute the XXH3 of ``content``, uint8 on the CPU: 5.5 GB/s on one core (zlib's CRC-32: 1.2
    GB/s)."""
    return xxhash.xxh3_64_intdigest(content.numpy().data)


def boxes_of(parts: Mapping[str, TensorPart]) -> tuple[Box, ...]:
    """Return the local boxes in the order in which they are packed."""
    boxes = [
        part.box(name)
        for name, part in parts.items()
        if part.local is not None and part.local.numel()
    ]
    return tuple(sorted(boxes, key=lambda box: (-box.dtype.itemsize, box.name)))


def pack(
    boxes: Sequence[Box], parts: Mapping[str, TensorPart], packed: torch.Tensor
) -> tuple[PackedPart, ...]:
    """Copy the local boxes into ``packed``, uint8 of their total size. Returns them with
    checksums."""
    table: list[PackedPart] = []
    for box, content in contents(boxes, packed):
        content.view(box.dtype).view(box.size).copy_(parts[box.name].elements())
        table.append(PackedPart(box, checksum(content)))
    return tuple(table)


def unpack(
    boxes: Sequence[Box], layout: ImageLayout, packed: torch.Tensor, image: torch.Tensor
) -> None:
    """Copy each packed box to its place in ``image``, uint8 [layout.num_bytes]."""
    for box, content in contents(boxes, packed):
        view_of(layout, box, image).copy_(content.view(box.dtype).view(box.size))


def damaged(parts: Sequence[PackedPart], packed: torch.Tensor) -> list[str]:
    """Return the names of the tensors whose packed bytes do not match their checksums."""
    boxes = [part.box for part in parts]
    return [
        part.box.name
        for part, (_, content) in zip(parts, contents(boxes, packed), strict=True)
        if checksum(content) != part.checksum
    ]


def start_in_image(boxes: Sequence[Box], layout: ImageLayout) -> int | None:
    """Return where the slice of the image begins that has the bytes of the packed boxes; None if
    there is none."""
    end = start = layout.offsets[boxes[0].name]
    for box in boxes:
        if box.size != box.shape or layout.offsets[box.name] != end:
            return None
        end += box.num_bytes
    return start


def contents(boxes: Sequence[Box], packed: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield each box with its bytes in ``packed``."""
    start = 0
    for box in boxes:
        yield box, packed[start : start + box.num_bytes]
        start += box.num_bytes


_READS_AT_ONCE = 8  # number of sources; each needs memory for its packed bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    layout: ImageLayout
    sources: tuple[RemoteSource, ...]  # the fetched parts, with checksums
    image: torch.Tensor


@dataclass(slots=True)
class WeightReceiver:
    """The versions of one host, whose name in errors is ``host``. Not thread-safe."""

    shared: SharedMemoryPublisher
    read: BufferReader
    offers: MemoryOffers
    host: str
    _held: dict[int, _Version] = field(default_factory=dict, init=False)
    _offered: dict[int, RemoteSource] = field(default_factory=dict, init=False)
    # Reused memory for packed bytes: allocating it costs as much as reading into it.
    _spare: deque[torch.Tensor] = field(default_factory=deque, init=False)

    def fetch(self, handle: RemoteMemoryHandle, parent: RemoteSource | None) -> Fetched:
        """Read a version from the trainer's ranks, or from ``parent``, a host that has the whole
        version. Raises WeightSyncError: the version is gone, incomplete or damaged, or there is no
        room for it."""
        started = time.perf_counter()
        layout, sources = handle.layout, handle.sources if parent is None else (parent,)
        _check_complete(layout, sources)
        segment = self.shared.begin(layout, handle.keep)
        try:
            self._forget_removed()
            write_header(layout, segment.image)
            num_bytes = self._receive_all(layout, sources, segment.image)
            shared = self.shared.finish(layout, segment)
        except BaseException:
            segment.remove()
            raise
        self._held[layout.version] = _Version(layout=layout, sources=sources, image=segment.image)
        seconds = time.perf_counter() - started
        return Fetched(handle=shared, num_bytes=num_bytes, seconds=seconds)

    def offer(self, version: int) -> RemoteSource:
        """Offer a whole fetched version, so that other hosts can read it from this host. Raises
        WeightSyncError: the version is not on this host, or its memory cannot be made readable."""
        if version not in self._offered:
            held = self._held.get(version)
            if held is None:
                raise WeightSyncError(f"version {version} is not on {self.host} any more")
            content = held.image[len(held.layout.header) :]
            self._offered[version] = RemoteSource(
                owner=self.host,
                parts=_whole_tensors(held, content),
                buffers=self.offers.offer(content),
                num_bytes=content.numel(),
            )
        return self._offered[version]

    def close(self) -> None:
        """Withdraw and remove all versions. Maps of readers on this host stay valid."""
        for source in self._offered.values():
            self.offers.withdraw(source.buffers)
        self._offered.clear()
        self._held.clear()
        self.shared.close()

    def _forget_removed(self) -> None:
        for version in set(self._held) - set(self.shared.versions):
            del self._held[version]
            offered = self._offered.pop(version, None)
            if offered is not None:
                self.offers.withdraw(offered.buffers)

    def _receive_all(
        self, layout: ImageLayout, sources: Sequence[RemoteSource], image: torch.Tensor
    ) -> int:
        # Monarch finds the current actor in a context variable.
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
        self.read(source.buffers, packed)
        if damaged(source.parts, packed):
            num_bytes += packed.numel()
            self.read(source.buffers, packed)
            names = damaged(source.parts, packed)
            if names:
                raise WeightSyncError(
                    f"version {layout.version}: {_listed(names)} arrived damaged twice at "
                    f"{self.host} from {source.owner} (the checksums differ), or {source.owner} "
                    "has replaced the version"
                )
        if start is None:
            unpack(boxes, layout, packed, image)
            self._spare.append(packed)  # only after a success
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
    """Return each tensor of an image, whose ``content`` has no header, as one part."""
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
