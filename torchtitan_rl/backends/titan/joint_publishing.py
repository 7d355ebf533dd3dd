"""Weights of several trainer ranks on one host, written into shared memory by all of them at once.

Each rank copies what it holds; nothing is gathered. Rank 0 makes room before, and makes the version
visible after all have written.

Invariant: a version that some rank could not write is never visible, and every rank comes back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.handle import SharedMemoryHandle
from torchtitan_rl.weights.image import (
    ImageLayout,
    TensorPart,
    plan_image,
    write_header,
    write_parts,
)
from torchtitan_rl.weights.segment import Segment, SegmentWriter
from torchtitan_rl.weights.shared_memory import SharedMemoryPublisher
from torchtitan_rl.weights.transport import host_name

_PATH_BYTES = 4096  # PATH_MAX of Linux


def all_on_one_host() -> bool:
    """Whether all ranks of the default process group are. Collective."""
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host_name())
    return len(set(hosts)) == 1


class JointPublisher:
    """One on each rank; ``publisher`` is rank 0's, and None elsewhere."""

    def __init__(self, publisher: SharedMemoryPublisher | None) -> None:
        self._publisher = publisher
        self._writer = SegmentWriter()

    def publish(
        self, version: int, parts: Mapping[str, TensorPart], *, keep: frozenset[int]
    ) -> SharedMemoryHandle | None:
        """The handle on rank 0, None elsewhere; see `WeightPublisher.publish`. Collective.

        Raises:
            WeightSyncError: on rank 0: there is no room, or some rank could not write.
        """
        layout = plan_image({name: part.whole() for name, part in parts.items()}, version)
        segment, refusal = self._begin(layout, keep)
        path = _path_of_first_rank(segment.path if segment is not None else None)
        if path is None:
            if refusal is not None:
                raise refusal
            return None
        errors = _errors_of_all_ranks(self._write(path, layout, parts, segment))
        if self._publisher is None or segment is None:
            return None
        if errors:
            segment.remove()
            raise WeightSyncError(f"version {version} cannot be written: {'; '.join(errors)}")
        return self._publisher.finish(layout, segment)

    def _begin(
        self, layout: ImageLayout, keep: frozenset[int]
    ) -> tuple[Segment | None, Exception | None]:
        """Rank 0's room for the version, or why there is none: to be raised when all know."""
        if self._publisher is None:
            return None, None
        try:
            return self._publisher.begin(layout, keep), None
        except Exception as refusal:
            return None, refusal

    def _write(
        self,
        path: Path,
        layout: ImageLayout,
        parts: Mapping[str, TensorPart],
        segment: Segment | None,
    ) -> str | None:
        """What went wrong, or None. Nothing is raised: the other ranks wait for the answer."""
        try:
            if segment is not None:
                write_header(layout, segment.image)
            image = self._writer.image(path) if segment is None else segment.image
            write_parts(layout, parts, image)
        except Exception as error:
            return repr(error)
        return None


# Both send tensors: what `broadcast_object_list` and `all_gather_object` send first, the sizes of
# pickles, doubles their time, and they are in every publishing.
def _path_of_first_rank(path: Path | None) -> Path | None:
    """The ``path`` that rank 0 gives. Collective."""
    if dist.get_world_size() == 1:
        return path
    encoded = b"" if path is None else os.fsencode(path)
    sent = torch.frombuffer(bytearray(encoded.ljust(_PATH_BYTES, b"\0")), dtype=torch.uint8)
    dist.broadcast(sent, src=0)
    received = bytes(sent.numpy()).rstrip(b"\0")
    return Path(os.fsdecode(received)) if received else None


def _errors_of_all_ranks(message: str | None) -> list[str]:
    """Those that are not None, each with its rank. Collective."""
    are_any = torch.tensor([message is not None], dtype=torch.int32)
    if dist.get_world_size() > 1:
        dist.all_reduce(are_any, dist.ReduceOp.MAX)
    if not are_any.item():
        return []
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, message)
    return [f"rank {rank}: {why}" for rank, why in enumerate(errors) if why]
