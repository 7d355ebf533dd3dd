"""Configuration of weight syncs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """How new weights reach the replicas."""

    mode: Literal["hot_swap", "drain"] = "hot_swap"
    """``hot_swap`` lets running requests continue under the new weights; ``drain`` waits until a
    replica has none."""
    transport: Literal["auto", "shared_memory", "rdma"] = "auto"
    """``auto`` takes shared memory where trainer and replicas share a host, else RDMA."""
    reset_prefix_cache_on_pull: bool = True
    """False lets prefixes that were cached under older weights serve new requests."""
    recompute_running_on_pull: bool = True
    """False lets running requests keep the KV cache of the weights they started with."""
    order: Literal["together", "one_by_one"] = "together"
    """Whether all replicas pull at once or one after the other."""
    lag_timeout_s: float = 30.0
    """Training does not wait longer than so many seconds for a slow replica, which pulls later."""
    timeout_s: float = 300.0
    """A replica that needs longer than so many seconds is lost."""
