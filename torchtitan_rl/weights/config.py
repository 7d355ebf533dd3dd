"""Configuration of weight syncs, and the choice of their transport."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Interval

from torchtitan_rl.bounds import Seconds


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """How new weights reach the replicas."""

    mode: Literal["hot_swap", "drain"] = "hot_swap"
    """``hot_swap`` continues running requests under the new weights; ``drain`` waits until they
    have ended."""
    transport: Literal["auto", "shared_memory", "rdma"] = "auto"
    """``auto`` is shared memory on the trainer's host and RDMA to the other hosts, through
    Monarch's own channels where there is no RDMA hardware; ``rdma`` is RDMA on every host."""
    fan_out: Annotated[int, Interval(ge=0, le=1 << 16)] = 2
    """Number of hosts that read a version from one source at the same time. Hosts that have a
    version become sources, so that many hosts fetch in a tree; 0: all read from the trainer."""
    reset_prefix_cache_on_pull: bool = True
    """Discard cached prefixes that older weights computed. False serves new requests from them."""
    recompute_running_on_pull: bool = True
    """Recompute the KV cache of running requests under the new weights. That takes all their tokens
    / the prefill rate of a replica, at each pull. False keeps the cache, which costs nothing; later
    tokens are then sampled over keys and values of older weights."""
    check_pulls: bool = True
    """Compare what some layers of each engine compute after a pull with the published weights: all
    layers at the first pull (5 to 30 ms on a CPU), then one layer at a time. An engine that differs
    counts as lost."""
    order: Literal["together", "one_by_one"] = "together"
    """Whether all replicas pull at the same time or one after the other."""
    lag_timeout_s: Seconds = 30.0
    """Maximum time that a weight sync waits for slow replicas, in seconds; they pull later.
    Colocated runs wait without this limit."""
    timeout_s: Seconds = 300.0
    """Deadline of each fetch and of each swap by a replica, in seconds; a replica that misses it
    counts as lost."""


class Transport(StrEnum):
    """Medium between the trainer and the generator ranks."""

    SHARED_MEMORY = "shared_memory"  # a memory-mapped file; one host only
    RDMA = "rdma"  # Monarch's RDMABuffer, over its channels without RDMA hardware
    BOTH = "both"  # shared memory on the trainer's host, RDMA to the other hosts


def choose_transport(
    configured: Literal["auto", "shared_memory", "rdma"],
    *,
    trainer_hosts: Collection[int],
    replica_hosts: Collection[int],
) -> Transport:
    """Choose the transport: shared memory within one host and RDMA between hosts, unless one is
    ``configured`` (`config/room.py` has checked it). The others are the host indices of every
    rank."""
    others = set(replica_hosts) - set(trainer_hosts)
    is_on_one_host = len(set(trainer_hosts)) == 1
    if configured == "shared_memory" or (configured == "auto" and is_on_one_host and not others):
        return Transport.SHARED_MEMORY
    if configured == "rdma" or not is_on_one_host or len(others) == len(set(replica_hosts)):
        return Transport.RDMA
    return Transport.BOTH


def hosts_that_fetch(
    transport: Transport, *, trainer_hosts: Collection[int], replica_hosts: Collection[int]
) -> list[int]:
    """Return the hosts whose replicas cannot use the trainer's shared memory."""
    if transport is Transport.SHARED_MEMORY:
        return []
    mapped = set(trainer_hosts) if transport is Transport.BOTH else set()
    return sorted(set(replica_hosts) - mapped)
