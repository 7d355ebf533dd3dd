"""Low-rank adapters (LoRA): their options, names and sizes, and their folders in PEFT's format.

An adapter adds ``alpha / rank * B A x`` to the output of a linear layer (Hu et al. 2021,
2106.09685); A is [rank, in] and B is [out, rank]. B is zero at first, so the initial policy is the
base. Names of tensors are those of PEFT, and a folder holds ``adapter_config.json`` and
``adapter_model.safetensors``, which PEFT, transformers and vLLM load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from torchtitan_rl.bounds import PositiveFloat
from torchtitan_rl.config.model import PolicyArchitecture

if TYPE_CHECKING:
    import torch

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"  # of a run, next to its exported policy
PEFT_PREFIX = "base_model.model."
_ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's LoRAConfig.max_lora_rank


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Train low-rank adapters on a frozen policy in place of all its weights (LoRA). Only the
    adapters are published, checkpointed and kept by the optimizer."""

    rank: Annotated[int, Interval(ge=0, le=_ENGINE_RANKS[-1])] = 0
    """Rank of the adapters; 0 trains all weights. The learning rate of adapters is about ten times
    that of all weights."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is scaled by ``alpha / rank``."""
    target_modules: tuple[Target, ...] = TARGETS
    """Linear layers that get adapters, by their names in Hugging Face checkpoints. ``k_proj`` and
    ``v_proj`` go together."""

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def lora_errors(lora: LoraConfig) -> list[str]:
    """One message per error: field, value, fix."""
    targets = lora.target_modules
    name = f"policy.lora.target_modules is {' '.join(targets) or 'empty'}"
    if not lora.rank:
        return []
    if not targets:
        return [f"{name}: give some of {' '.join(TARGETS)}"]
    if len(set(targets)) < len(targets):
        return [f"{name}: give each layer once"]
    if ("k_proj" in targets) != ("v_proj" in targets):
        return [f"{name}: k_proj and v_proj have one configuration; give both or neither"]
    return []


def engine_rank(rank: int) -> int:
    """The smallest rank that vLLM allocates and that holds adapters of ``rank``."""
    return next(one for one in _ENGINE_RANKS if one >= rank)


def adapter_shapes(
    architecture: PolicyArchitecture, lora: LoraConfig
) -> dict[str, tuple[int, int]]:
    """The shapes of all tensors of an adapter, by PEFT's names."""
    a = architecture
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    sizes = {  # module, in, out
        "q_proj": ("self_attn", a.dim, queries),
        "k_proj": ("self_attn", a.dim, keys),
        "v_proj": ("self_attn", a.dim, keys),
        "o_proj": ("self_attn", queries, a.dim),
        "gate_proj": ("mlp", a.dim, a.hidden_dim),
        "up_proj": ("mlp", a.dim, a.hidden_dim),
        "down_proj": ("mlp", a.hidden_dim, a.dim),
    }
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(a.num_layers):
        for target in lora.target_modules:
            module, size_in, size_out = sizes[target]
            name = f"{PEFT_PREFIX}model.layers.{layer}.{module}.{target}"
            shapes[f"{name}.lora_A.weight"] = (lora.rank, size_in)
            shapes[f"{name}.lora_B.weight"] = (size_out, lora.rank)
    return shapes


def num_adapter_weights(architecture: PolicyArchitecture, lora: LoraConfig) -> int:
    """The number of trained weights."""
    return sum(rows * columns for rows, columns in adapter_shapes(architecture, lora).values())


def write_adapter(
    folder: Path, lora: LoraConfig, tensors: Mapping[str, torch.Tensor], *, base: str
) -> None:
    """Write an adapter into an existing folder. ``base``: the model that it was trained on."""
    from safetensors.torch import save_file

    document: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(document, indent=2) + "\n")
    weights = folder / ADAPTER_WEIGHTS
    weights.touch()
    mode = weights.stat().st_mode  # save_file creates a file that only the owner can read
    save_file(dict(tensors), weights, metadata={"format": "pt"})
    weights.chmod(mode)
