"""What an engine loop is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_rl.generation.decision import KvPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """``heartbeat_s``: after so long an idle leader of several ranks sends an empty decision; keep
    it well below the time-out of the channel. ``version``: of the weights the engine starts with.
    Listeners are told of progress every ``stream_interval_s`` or, where they do not stream, every
    ``progress_interval_s`` at most.
    """

    name: str = "replica"
    max_steps_per_decision: int = 4
    heartbeat_s: float = 60.0
    kv_policy: KvPolicy = field(default_factory=KvPolicy)
    version: int = 0
    stream_interval_s: float = 0.02
    progress_interval_s: float = 1.0
    stats_interval_s: float = 0.2  # between two readings of the engine's counters
