"""Configuration of weight syncs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """How new weights reach the replicas."""

    mode: Literal["hot_swap", "drain"] = "hot_swap"
    """``hot_swap`` continues running requests under the new weights; ``drain`` waits until they
    have ended."""
    transport: Literal["auto", "shared_memory", "rdma"] = "auto"
    """``auto`` is shared memory on the trainer's host and RDMA to the other hosts, over Monarch's
    own channels where there is no RDMA hardware; ``rdma`` is RDMA on every host."""
    fan_out: int = 2
    """Number of hosts that read a version from one source at the same time. Hosts that have a
    version are sources for the others, so that many hosts fetch in a tree. 0: all from the
    trainer."""
    reset_prefix_cache_on_pull: bool = True
    """False serves new requests from prefixes that were cached under older weights."""
    recompute_running_on_pull: bool = True
    """False keeps the KV cache that running requests computed under older weights."""
    order: Literal["together", "one_by_one"] = "together"
    """Whether all replicas pull at the same time or one after the other."""
    lag_timeout_s: float = 30.0
    """Longest time that a weight sync waits for slow replicas, in seconds; they pull later. The
    next sync begins after this one. Colocated runs wait without this limit."""
    timeout_s: float = 300.0
    """Deadline of one replica's pull, in seconds; a replica that misses it is dead."""
