"""Replicas in processes of their own, for scenarios and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torchtitan_rl.backends.monarch.generator import MonarchReplica, spawn_replica
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.weights.config import WeightSyncConfig


async def spawn_vllm(
    index: int,
    model: Path,
    generator: GeneratorConfig,
    *,
    folder: Path,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    threads: int = 1,
    cores: tuple[int, ...] = (),
    weight_sync: WeightSyncConfig | None = None,
    trace_dir: Path | None = None,
) -> MonarchReplica:
    """``replica{index}`` of vLLM, whose engine is not built yet; it logs into ``folder``. The
    ``index`` is its seed, and on CUDA the number of its device, or of the first one."""
    ranks = generator.tensor_parallel
    group = ProcessGroup(
        name=f"replica{index}",
        ranks=ranks,
        threads=threads,
        devices=tuple(map(str, range(index, index + ranks))) if device == "cuda" else (),
        cores=cores,
    )
    spec = GeneratorSpec(
        name=group.name,
        model=model,
        device=device,
        dtype=dtype,
        seed=index,
        generator=generator,
        weight_sync=weight_sync or WeightSyncConfig(),
        log_dir=folder,
        trace_dir=trace_dir,
    )
    return await spawn_replica(group, spec, engine_environment(threads, device))
