"""Rotary embeddings in a ``config.json``, as transformers 4 or 5 wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
_DEFAULT_THETA = 10000.0  # what transformers assumes


def rope_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of transformers 5, or ``rope_scaling`` of 4."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def rope_theta(config: Mapping[str, Any]) -> Any:
    return rope_scaling(config).get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA


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
