"""How weights get from the trainer to the replicas: the transports and their choice."""

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
    """Medium between the trainer and the generator ranks."""

    SHARED_MEMORY = "shared_memory"  # a memory-mapped file; one host only
    RDMA = "rdma"  # Monarch's RDMABuffer, over TCP without RDMA hardware


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
        """Publish whole tensors, in Hugging Face names, as ``version``. They are copied.

        Afterwards this version, the one published before, and those in ``keep`` that were readable
        are readable; the others are released before this one is written.

        Raises:
            WeightSyncError: the version cannot be published.
        """
        ...

    def close(self) -> None:
        """Release all versions and their memory."""
        ...


def host_name() -> str:
    """Name of the machine of this process; processes with equal names can share memory."""
    return socket.gethostname()


def choose_transport(
    configured: Literal["auto", "shared_memory", "rdma"],
    *,
    trainer_host: str,
    replica_hosts: Sequence[str],
) -> Transport:
    """Shared memory if everything runs on the trainer's host, else RDMA, unless ``configured``.

    Args:
        trainer_host: host of the trainer's rank 0, which publishes.
        replica_hosts: hosts of all generator ranks.

    Raises:
        ConfigError: shared memory is configured and a generator rank runs on another host.
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
