"""`GlooLockstep`: broadcasts decisions over a gloo group separate from the model's collectives."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

HEADER_BYTES = 2048  # one message for most decisions: 8 bytes of length, then the payload's head


class GlooLockstep:
    """A `LockstepChannel` from rank 0 of the default process group to all its ranks.

    Created on all ranks in the same order; a broadcast that waits for longer than ``timeout_s``
    raises on the waiting ranks.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.world_size: int = dist.get_world_size()
        self._header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)

    def broadcast(self, data: bytes | None) -> bytes:
        capacity = HEADER_BYTES - 8  # of the header, for the payload
        if data is not None:
            head = len(data).to_bytes(8, "little") + data[:capacity]
            self._header[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        dist.broadcast(self._header, src=0, group=self._group)
        received = self._header.numpy().tobytes()
        num_bytes = int.from_bytes(received[:8], "little")
        if num_bytes <= capacity:
            return received[8 : 8 + num_bytes]
        rest = torch.empty(num_bytes - capacity, dtype=torch.uint8)
        if data is not None:
            rest.copy_(torch.frombuffer(bytearray(data[capacity:]), dtype=torch.uint8))
        dist.broadcast(rest, src=0, group=self._group)
        return received[8:] + rest.numpy().tobytes()

    def barrier(self) -> None:
        dist.barrier(group=self._group)
