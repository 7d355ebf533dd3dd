"""Rotary embeddings in a ``config.json``, as transformers 4 or 5 wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
_DEFAULT_THETA = 10000.0  # what transformers assumes


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Parameters by which Llama 3.1 scales its rotary frequencies, with torchtitan's names."""

    scaling_factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Parameters of YaRN (Peng et al. 2023, 2309.00071) as DeepSeek-V3 uses it, with torchtitan's
    names: attention is scaled by ``mscale``, cosines and sines are not."""

    rope_factor: float
    original_seq_len: int
    beta_fast: float
    beta_slow: float
    mscale: float


def rope_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` of transformers 5, or ``rope_scaling`` of transformers 4."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def rope_theta(config: Mapping[str, Any]) -> Any:
    return rope_scaling(config).get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA


def unsupported_rope(config: Mapping[str, Any], scaling: str) -> list[str]:
    """``scaling``: the type that the family supports, llama3 or yarn."""
    rope = rope_scaling(config)
    kind = rope_type(rope)
    if kind not in ("default", scaling):
        return [f"rope_type {kind!r} is not supported; use default or {scaling}"]
    needed = {"llama3": _LLAMA3, "yarn": _YARN}.get(kind, ())
    if missing := [name for name in needed if name not in rope]:
        return [f"rope_type {kind!r} lacks {', '.join(missing)}"]
    if kind == "yarn" and (
        rope["mscale"] != rope["mscale_all_dim"]
        or rope.get("attention_factor") is not None
        or not rope.get("truncate", True)
    ):
        return [
            "rope_type 'yarn' is supported only with equal mscale and mscale_all_dim, without "
            "attention_factor, and with truncate"
        ]
    return []


def frequency_scaling(config: Mapping[str, Any]) -> Llama3Scaling | YarnScaling | None:
    """Return the scaling of supported rotary embeddings; None for the default type."""
    rope = rope_scaling(config)
    match rope_type(rope):
        case "llama3":
            return Llama3Scaling(*(rope[name] for name in _LLAMA3))
        case "yarn":
            factor, length, mscale, _ = (rope[name] for name in _YARN)
            fast, slow = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
            return YarnScaling(factor, length, fast, slow, mscale)
    return None


def with_flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in one form for both versions: rotary fields at the top level.

    >>> with_flat_rope({"rope_parameters": {"rope_theta": 5e5}}) == with_flat_rope(
    ...     {"rope_theta": 5e5}
    ... )
    True
    """
    rope = rope_scaling(config)
    rest = {name: value for name, value in config.items() if name not in _FIELDS}
    scaling = {name: value for name, value in rope.items() if name != "type"}
    said = {"rope_type": rope_type(rope), "rope_theta": rope_theta(config)}
    return {**rest, **scaling, **said}
