"""Runs vLLM engines with experts (MoE) in a process of its own and saves what it saw, as
`vllm_scenarios` does: ``python -m tests.real.moe_scenarios pulled DIR``, and under torchrun
``tp DIR``."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.real.vllm_scenarios import (
    Checkpoints,
    TriggeredEngine,
    build,
    idle_pull,
    is_leader,
    mixed,
    play,
    probes,
    request,
)

# isort: split
from vllm.model_executor.layers import utils

from torchtitan_rl.backends.vllm import engine
from torchtitan_rl.errors import LoopFailedError
from torchtitan_rl.generation.decision import Pull

NUM_VERSIONS = 4


def versions(root: Path) -> list[Path]:
    return [root / f"v{version}" for version in range(NUM_VERSIONS)]


def engine_of(root: Path, *, tensor_parallel: int = 1, version: int = 0) -> TriggeredEngine:
    paths = versions(root)
    return build(paths[version], Checkpoints(paths), tensor_parallel=tensor_parallel)


def pulled(root: Path) -> dict[str, Any]:
    # An engine takes the process's groups with it when it goes, so this one stays.
    refused, _own = pulled_into_packed_parameters(root)
    seen: dict[str, Any] = {"packed parameters": refused}
    pulling = engine_of(root)
    seen |= {"mixed": mixed(pulling)}  # with a pull of version 1
    idle_pull(pulling, 2)
    idle_pull(pulling, 3)
    seen |= {"third": probes(pulling), "fresh": probes(engine_of(root, version=3))}
    seen["crowded"], seen["preemptions"] = crowded(root)
    with patch.object(engine, "repack", lambda model: None):
        seen["not packed again"] = refused_pull(pulling)
    return seen


def crowded(root: Path) -> tuple[dict[str, Any], int]:
    """Requests that preempt one another, with a pull between, on a cache that is too small."""
    paths = versions(root)
    engine = build(paths[0], Checkpoints(paths), kv_cache_bytes=1 << 20)
    requests = [request(f"{number}", 200, seed=number) for number in range(12)]
    done = play(engine, requests, triggers=lambda loop: {60: lambda: loop.execute(Pull(1))})
    return done, engine.stats().preemptions


def pulled_into_packed_parameters(root: Path) -> tuple[str, TriggeredEngine]:
    """The first engine of the process, with vLLM's own packing of experts: a pull writes into the
    packed parameters."""

    def repack_linears(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    with patch.object(engine, "keep_expert_weights", lambda: None):
        own = engine_of(root)
        with patch.object(engine, "repack", repack_linears):
            return refused_pull(own), own


def refused_pull(pulling: TriggeredEngine) -> str:
    try:
        idle_pull(pulling, 1)
    except LoopFailedError as error:
        return str(error)
    return ""


def tp(root: Path) -> dict[str, Any]:
    from torchtitan_rl.backends.vllm.engine import GlooLockstep

    return mixed(engine_of(root, tensor_parallel=2), GlooLockstep(timeout_s=120.0))


if __name__ == "__main__":
    mode, root = sys.argv[1], Path(sys.argv[2])
    observed = {"pulled": pulled, "tp": tp}[mode](root)
    if is_leader():
        (root / f"{mode}.pickle").write_bytes(pickle.dumps(observed))
