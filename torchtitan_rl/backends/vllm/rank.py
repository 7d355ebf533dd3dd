"""One rank of a replica: its engine and the loop that steps it."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.engine import StagedWeights, VllmEngine
from torchtitan_rl.errors import LoopFailedError
from torchtitan_rl.generation.config import GeneratorConfig, LoopConfig
from torchtitan_rl.generation.decision import KvPolicy
from torchtitan_rl.generation.lockstep import LockstepChannel, SoloChannel
from torchtitan_rl.generation.loop import EngineLoop, OnWork


def build_loop(
    spec: GeneratorSpec,
    rank: int,
    weights: StagedWeights | None = None,
    *,
    on_end: Callable[[LoopFailedError | None], None] | None = None,
    on_pulled: Callable[[int], None] | None = None,
    on_work: OnWork | None = None,
) -> EngineLoop:
    """Build the engine, on all ranks together, and its loop; see `EngineLoop` for the callbacks."""
    generator, sync = spec.generator, spec.weight_sync
    return EngineLoop(
        VllmEngine(spec, weights),
        _channel(generator),
        is_leader=rank == 0,
        config=LoopConfig(
            name=spec.name,
            max_steps_per_decision=generator.max_steps_per_decision,
            heartbeat_s=generator.heartbeat_s,
            stream_interval_s=spec.stream_interval_s,
            kv_policy=KvPolicy(
                reset_prefix_cache=sync.reset_prefix_cache_on_pull,
                recompute_running=sync.recompute_running_on_pull,
            ),
        ),
        on_end=on_end,
        on_pulled=on_pulled,
        on_work=on_work,
    )


def _channel(generator: GeneratorConfig) -> LockstepChannel:
    if generator.tensor_parallel == 1:
        return SoloChannel()
    from torchtitan_rl.backends.vllm.gloo_lockstep import GlooLockstep

    return GlooLockstep(timeout_s=generator.collective_timeout_s)
