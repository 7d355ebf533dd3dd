"""What a Hugging Face ``config.json`` says about a policy, and whether we can train it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import ConfigError

_SUPPORTED = {"qwen3": True, "llama": False}  # model_type -> has norms on queries and keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its rotary frequencies; names are torchtitan's."""

    scaling_factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyArchitecture:
    """The sizes of a dense decoder. ``dtype`` is what its checkpoint is stored in."""

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    has_qk_norm: bool
    has_tied_embeddings: bool
    dtype: str


def read_architecture(checkpoint_dir: Path) -> PolicyArchitecture:
    """Read ``config.json``, as transformers 4 or 5 wrote it.

    Raises:
        ConfigError: the file is not there, or describes a model that is not supported.
    """
    path = checkpoint_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"policy.checkpoint: {path} is not there; give a Hugging Face directory")
    config: dict[str, Any] = json.loads(path.read_text())
    if mistakes := [f"policy.checkpoint: {path}: {why}" for why in _unsupported(config)]:
        raise ConfigError(mistakes)
    rope = _rope(config)
    return PolicyArchitecture(
        dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        rope_scaling=_llama3_scaling(rope),
        has_qk_norm=_SUPPORTED[config["model_type"]],
        has_tied_embeddings=config.get("tie_word_embeddings", False),
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
    )


def _unsupported(config: dict[str, Any]) -> list[str]:
    reasons = []
    if config.get("model_type") not in _SUPPORTED:
        reasons.append(
            f"model_type {config.get('model_type')!r} is not supported; use one of "
            f"{', '.join(_SUPPORTED)}"
        )
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(field):
            reasons.append(f"{field} is not supported; use a model without it")
    if config.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act {config['hidden_act']!r} is not supported; use silu")
    kind = _rope_type(_rope(config))
    if kind not in ("default", "llama3"):
        reasons.append(f"rope_type {kind!r} is not supported; use default or llama3")
    return reasons


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of transformers 5, or ``rope_scaling`` of 4."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _llama3_scaling(rope: dict[str, Any]) -> Llama3Scaling | None:
    if _rope_type(rope) != "llama3":
        return None
    return Llama3Scaling(
        scaling_factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
