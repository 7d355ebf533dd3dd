"""What a pull does to KV that older weights computed, applied to an engine."""

from __future__ import annotations

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.generation.decision import KvPolicy
from torchtitan_rl.generation.engine import Engine


def refresh_kv(engine: Engine, policy: KvPolicy | None, *, running: int, what: str) -> bool:
    """Apply ``policy`` while ``running`` requests are unfinished; True where those recompute.

    Raises:
        WeightSyncError: ``what`` (replica and version) left old prefixes in the cache.
    """
    if policy is None or not policy.reset_prefix_cache:
        return False
    was_reset = engine.reset_prefix_cache(recompute_running=policy.recompute_running)
    # While running requests keep their KV a refusal is expected; the engine itself keeps later
    # requests from reading old blocks (see `Engine.swap_weights`).
    if not was_reset and (policy.recompute_running or running == 0):
        raise WeightSyncError(
            f"{what}: the prefix cache was not reset ({running} requests unfinished)"
        )
    return policy.recompute_running and running > 0
