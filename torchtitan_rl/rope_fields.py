"""Rotary embeddings in a ``config.json``, as transformers 4 or 5 wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_DEFAULT_THETA = 10000.0  # what transformers assumes


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Parameters by which Llama 3.1 scales its rotary frequencies, with torchtitan's names."""

    scaling_factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def rope_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` of transformers 5, or ``rope_scaling`` of transformers 4."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def rope_theta(config: Mapping[str, Any]) -> Any:
    return rope_scaling(config).get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA


def unsupported_rope(config: Mapping[str, Any]) -> list[str]:
    rope = rope_scaling(config)
    kind = rope_type(rope)
    if kind not in ("default", "llama3"):
        return [f"rope_type {kind!r} is not supported; use default or llama3"]
    if kind == "llama3" and (missing := [name for name in _LLAMA3 if name not in rope]):
        return [f"rope_type 'llama3' lacks {', '.join(missing)}"]
    return []


def llama3_scaling(config: Mapping[str, Any]) -> Llama3Scaling | None:
    rope = rope_scaling(config)
    if rope_type(rope) != "llama3":
        return None
    return Llama3Scaling(*(rope[name] for name in _LLAMA3))


def with_flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in one form for both versions: rotary fields at the top level, with
    defaults for missing ones.

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
