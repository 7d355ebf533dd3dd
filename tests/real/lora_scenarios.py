"""Runs vLLM engines with adapters in a process of its own and saves what it saw, as
`vllm_scenarios` does: ``python -m tests.real.lora_scenarios pulled DIR``, and with torchrun
``tp DIR``. DIR has the policy ``base`` and its adapters, ``v1/adapter`` to ``v3/adapter``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.real.vllm_scenarios import (
    LONG_PROMPT,
    WAIT_S,
    TriggeredEngine,
    build,
    idle_pull,
    incomplete_pull,
    kept_kv,
    make_loop,
    mixed,
    play,
    probes,
    request,
    save,
)

# isort: split
import torch
from safetensors.torch import load_file

from torchtitan_rl.config.lora import (
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS,
    LoraConfig,
    read_adapters,
)
from torchtitan_rl.config.model import read_architecture

LORA = LoraConfig(rank=4, alpha=8.0)


class StagedAdapters:
    """Version v is the adapter in ``v{v}``. Any other lacks a tensor."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def tensors(self, version: int) -> Mapping[str, torch.Tensor]:
        folder = self._root / f"v{version}" / ADAPTER_FOLDER
        if folder.is_dir():
            return load_file(folder / ADAPTER_WEIGHTS)
        tensors = load_file(self._root / "v1" / ADAPTER_FOLDER / ADAPTER_WEIGHTS)
        return dict(list(tensors.items())[1:])


def engine_of(root: Path, *, tensor_parallel: int = 1) -> TriggeredEngine:
    weights = StagedAdapters(root)
    return build(root / "base", weights, lora=LORA, tensor_parallel=tensor_parallel)


def pulled(root: Path) -> dict[str, Any]:
    engine = engine_of(root)
    seen: dict[str, Any] = {"before": probes(engine), "kept": kept_kv(engine)}
    idle_pull(engine, 2)
    seen["mixed"] = mixed(engine)  # with a pull of version 1
    idle_pull(engine, 3)
    seen["third"] = probes(engine)
    seen["shm"] = [path.name for path in Path("/dev/shm").glob("torchtitan-rl-adapter-*")]
    seen["incomplete"] = incomplete_pull(engine)
    fresh = engine_of(root)
    idle_pull(fresh, 3)
    seen["fresh"] = probes(fresh)
    seen["served"] = served(root)
    return seen


def served(root: Path) -> dict[str, Any]:
    """24 requests of two adapters and the base together, and those of each alone."""
    adapters, errors = read_adapters(
        [f"{name}={root / name / ADAPTER_FOLDER}" for name in ("v1", "v3")],
        read_architecture(root / "base"),
        model_name="policy",
    )
    assert errors == []
    engine = build(root / "base", None, adapters=adapters)
    requests = [
        replace(
            request(f"{name or 'base'}-{number}", 12 + number, LONG_PROMPT[: 60 + number], seed=1),
            adapter=name,
        )
        for number in range(8)
        for name in ("v1", "", "v3")
    ]
    seen = {"together": play(engine, requests)}
    for name in ("", "v1", "v3"):  # whose prefixes are in the cache
        seen[name or "base"] = play(engine, [one for one in requests if one.adapter == name])
    loop = make_loop(engine)
    loop.start()
    unknown = replace(request("unknown"), adapter="v2")
    seen["refusal"] = str(loop.submit(unknown).exception(WAIT_S))
    loop.close()
    return seen


def tp(root: Path) -> dict[str, Any]:
    """What `pulled` mixes, on two ranks. Only loops with a lockstep channel can step them."""
    from torchtitan_rl.backends.vllm.engine import GlooLockstep

    engine = engine_of(root, tensor_parallel=2)
    engine.swap_weights(2)
    return mixed(engine, GlooLockstep(timeout_s=120.0))


if __name__ == "__main__":
    mode, root = sys.argv[1], Path(sys.argv[2])
    save(root, mode, {"pulled": pulled, "tp": tp}[mode](root))
