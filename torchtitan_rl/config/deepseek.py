"""The fields of ``config.json`` that only DeepSeek-V3's architecture has (``deepseek_v3``): latent
attention (MLA), and experts in groups.

Latent attention (DeepSeek-V2, 2405.04434): keys and values of all heads are projected from one
vector of a token, and queries may be, too. A part of each query is rotated; the rotated part of the
keys is the same for all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of latent attention. Queries and keys have ``PolicyArchitecture.head_dim`` elements, of
    which the last ``rope_dim`` are rotated."""

    query_rank: int | None  # None: queries are projected directly
    kv_rank: int
    rope_dim: int
    value_dim: int


DEFAULTS: Mapping[str, float] = {
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
SIZES = (
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_shared_experts", "n_group", "topk_group"),
)
# Where vLLM takes another router if the field is missing.
_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# As in all published models; vLLM ignores the last one.
_FIXED = {"moe_layer_freq": 1, "rope_interleave": True, "tie_word_embeddings": False}

_LAYER, _ATTENTION = "model.layers.{}", "layers.{}.attention"
TENSOR_NAMES = {
    f"{_LAYER}.self_attn.{theirs}.weight": f"{_ATTENTION}.{ours}.weight"
    for theirs, ours in {
        "q_proj": "wq",
        "q_a_proj": "wq_a",
        "q_a_layernorm": "q_norm",
        "q_b_proj": "wq_b",
        "kv_a_proj_with_mqa": "wkv_a",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "wkv_b",
    }.items()
} | {
    f"{_LAYER}.mlp.gate.e_score_correction_bias": "layers.{}.moe.expert_bias_E",
    **{
        f"{_LAYER}.mlp.shared_experts.{theirs}.weight": f"layers.{{}}.moe.shared_experts.{ours}"
        ".weight"
        for theirs, ours in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items()
    },
}


def latent_attention(config: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        query_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )


def unsupported_fields(config: Mapping[str, Any]) -> list[str]:
    """Reasons why a model cannot be trained. Its `SIZES` and those of its experts are valid."""
    reasons = [
        f"{name} is {config.get(name)!r}; only {value!r} is supported (if the model has it, write "
        "it into config.json)"
        for name, value in _ROUTER.items()
        if config.get(name) != value
    ]
    reasons += [
        f"{name} is {config[name]!r}; only {value!r} is supported"
        for name, value in _FIXED.items()
        if config.get(name, value) != value
    ]
    heads = config["num_attention_heads"]
    if (of_keys := config.get("num_key_value_heads") or heads) != heads:
        reasons.append(f"num_key_value_heads is {of_keys}: give num_attention_heads ({heads})")
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    if not isinstance(dense, int) or not 0 <= dense < layers:
        reasons.append(
            f"first_k_dense_replace is {dense!r}: give a whole number below num_hidden_layers "
            f"({layers})"
        )
    number, groups, chosen = (config[name] for name in ("num_experts", "n_group", "topk_group"))
    of_token = config["num_experts_per_tok"]
    if number % groups or number // groups < 2:  # a group's score is the sum of its two best
        reasons.append(
            f"n_group is {groups}: give a divisor of the {number} experts, with 2 or more in a "
            "group"
        )
    elif chosen > groups or of_token > chosen * (number // groups):
        reasons.append(
            f"topk_group is {chosen}: give at most n_group ({groups}), and enough groups for the "
            f"{of_token} experts of a token"
        )
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if config["v_head_dim"] > width:
        reasons.append(
            f"v_head_dim is {config['v_head_dim']}: values longer than keys ({width}) are not "
            "supported"
        )
    if config["qk_rope_head_dim"] % 2:
        reasons.append(f"qk_rope_head_dim {config['qk_rope_head_dim']} is odd")
    return reasons
