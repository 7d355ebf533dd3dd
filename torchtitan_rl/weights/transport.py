"""Which way weights travel, decided from the configuration and from who runs where."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.weights.handle import WeightHandle

if TYPE_CHECKING:
    import torch


class Transport(StrEnum):
    """How the bytes of a version get from the trainer to the generator ranks."""

    SHARED_MEMORY = "shared_memory"  # a memory-mapped file; all on one host
    RDMA = "rdma"  # Monarch's RDMABuffer, over TCP where there is no such hardware


class WeightPublisher(Protocol):
    """Makes versions readable by the generator ranks. Both methods block."""

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        /,
        *,
        keep: frozenset[int] = frozenset(),
    ) -> WeightHandle:
        """Offer whole tensors, in Hugging Face names, as ``version``.

        The tensors are copied. Readable are then this version, the one offered before, and those
        in ``keep`` that were readable; the others stop to be so before this one is written.

        Raises:
            WeightSyncError: it cannot be done.
        """
        ...

    def close(self) -> None:
        """Give up all versions and their memory."""
        ...


def host_name() -> str:
    """Of the machine that the calling process runs on: equal where memory can be shared."""
    return socket.gethostname()


def choose_transport(
    configured: Literal["auto", "shared_memory", "rdma"],
    *,
    trainer_host: str,
    replica_hosts: Sequence[str],
) -> Transport:
    """Shared memory where everything runs on the trainer's host, else RDMA; or what was forced.

    Args:
        trainer_host: of the trainer's rank 0, which publishes.
        replica_hosts: of every generator rank.

    Raises:
        ConfigError: shared memory is forced though a generator rank runs on another host.
    """
    others = sorted(set(replica_hosts) - {trainer_host})
    if configured == "shared_memory" and others:
        raise ConfigError(
            f"weight_sync.transport: shared_memory does not reach from {trainer_host} (trainer) to "
            f"{', '.join(others)} (generator); use auto or rdma"
        )
    if configured == "rdma" or (configured == "auto" and others):
        return Transport.RDMA
    return Transport.SHARED_MEMORY
