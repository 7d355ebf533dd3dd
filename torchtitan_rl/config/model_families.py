"""The model families that can be trained: one entry each, for all who read or build a policy.

Every family is a dense decoder that torchtitan builds by its Qwen3 model, with the parts that its
entry names. A further family of that kind is an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How the dense decoders of one ``model_type`` differ from Llama's."""

    has_qk_norm: bool = False
    """Norms on queries and keys."""
    has_qkv_bias: bool = False
    """Biases of the query, key and value projections."""
    default_head_dim: int | None = None
    """Where ``config.json`` does not say; otherwise ``hidden_size / num_attention_heads``."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """What transformers takes for further fields that ``config.json`` leaves out."""
    has_sliding_window_switch: bool = False
    """``sliding_window`` counts only where ``use_sliding_window`` is true."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Of the tensors that torchtitan's Qwen3 does not have: Hugging Face's name to torchtitan's,
    with ``{}`` for the layer."""


_ATTENTION = "model.layers.{}.self_attn", "layers.{}.attention.qkv_linear"

FAMILIES = {
    "qwen3": ModelFamily(
        has_qk_norm=True,
        default_head_dim=128,
        defaults={"num_key_value_heads": 32},
        has_sliding_window_switch=True,
    ),
    "qwen2": ModelFamily(  # and Qwen2.5
        has_qkv_bias=True,
        defaults={"num_key_value_heads": 32},
        has_sliding_window_switch=True,
        tensor_names={
            f"{_ATTENTION[0]}.{name}_proj.bias": f"{_ATTENTION[1]}.w{name}.bias" for name in "qkv"
        },
    ),
    "llama": ModelFamily(),  # SmolLM2 among others
    "mistral": ModelFamily(defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
}
"""By ``model_type`` of ``config.json``."""
