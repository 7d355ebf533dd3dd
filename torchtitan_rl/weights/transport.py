"""How weights get from the trainer to the replicas: the transports and their choice."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.weights.handle import WeightHandle

if TYPE_CHECKING:
    import torch


class Transport(StrEnum):
    """Medium between the trainer and the generator ranks."""

    SHARED_MEMORY = "shared_memory"  # a memory-mapped file; one host only
    RDMA = "rdma"  # Monarch's RDMABuffer, over its channels without RDMA hardware
    BOTH = "both"  # the former on the trainer's host, the latter to the others

    @property
    def shares_memory(self) -> bool:
        return self is not Transport.RDMA

    @property
    def reaches_others(self) -> bool:
        return self is not Transport.SHARED_MEMORY


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
    trainer_hosts: Collection[int],
    replica_hosts: Collection[int],
) -> Transport:
    """Shared memory where trainer and replicas are on one host, RDMA between hosts, unless
    ``configured``.

    Args:
        trainer_hosts, replica_hosts: those of all ranks, by their places in the list of hosts.

    Raises:
        ConfigError: shared memory is configured and does not reach all replicas.
    """
    others = sorted(set(replica_hosts) - set(trainer_hosts))
    is_on_one_host = len(set(trainer_hosts)) == 1
    if configured == "shared_memory" and (others or not is_on_one_host):
        trainer = ", ".join(map(str, sorted(set(trainer_hosts))))
        replicas = ", ".join(map(str, sorted(set(replica_hosts))))
        raise ConfigError(
            f"weight_sync.transport: shared_memory does not reach from host {trainer} (trainer) to "
            f"host {replicas} (generator); use auto or rdma"
        )
    if configured == "shared_memory" or (configured == "auto" and is_on_one_host and not others):
        return Transport.SHARED_MEMORY
    if configured == "rdma" or not is_on_one_host or len(others) == len(set(replica_hosts)):
        return Transport.RDMA
    return Transport.BOTH


def hosts_that_fetch(
    transport: Transport, *, trainer_hosts: Collection[int], replica_hosts: Collection[int]
) -> list[int]:
    """The hosts of replicas that do not have the trainer's shared memory."""
    if transport is Transport.SHARED_MEMORY:
        return []
    mapped = set(trainer_hosts) if transport is Transport.BOTH else set()
    return sorted(set(replica_hosts) - mapped)
