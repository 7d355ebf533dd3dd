"""What of two servers' answers must be equal, as plain dictionaries; streams are joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

TOLERANCE = 1e-5  # float32 on both sides, by other kernels (see `backends/vllm/engine.py`)

# Of one answer alone, or of the machine and settings of one server.
OWN = {"id", "created", "system_fingerprint", "policy_versions"}
TEXTS = {"content", "text", "arguments", "reasoning"}


def plain(value: Any) -> Any:
    """Without ids and times."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in OWN}
    return [plain(item) for item in value] if isinstance(value, list) else value


def about(value: Any) -> Any:
    """Equal to what differs in the rounding of numbers alone."""
    if isinstance(value, dict):
        return {key: about(item) for key, item in value.items()}
    if isinstance(value, list):
        return [about(item) for item in value]
    return pytest.approx(value, abs=TOLERANCE) if isinstance(value, float) else value


def joined(chunks: Iterable[Any]) -> dict[str, Any]:
    """All that a stream said, by choice: how it was cut into chunks is no matter."""
    choices: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {"choices": choices}
    for chunk in chunks:
        body = chunk.model_dump()
        if body.get("usage"):
            answer["usage"] = body["usage"]
        for choice in body["choices"]:
            _add(choices.setdefault(choice.pop("index"), {}), choice)
    return plain(answer)


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Texts and lists grow, tool calls by their index; of anything else the last stays."""
    for key, value in part.items():
        if value is None:
            whole.setdefault(key, None)
            continue
        old = whole.get(key)
        if key == "tool_calls":
            whole[key] = old or {}
            for call in value:
                _add(whole[key].setdefault(call.pop("index"), {}), call)
        elif isinstance(value, dict):
            whole[key] = old or {}
            _add(whole[key], value)
        elif isinstance(value, list):
            whole[key] = (old or []) + value
        elif key in TEXTS:
            whole[key] = (old or "") + value
        else:
            whole[key] = value
