"""Values of a run's files, which may be anything: of any type, of any size, made to do harm.

A value of an unexpected type counts as missing, texts are cut, and numbers are those that a browser
reads exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_rl.observability.explain import finite

MAX_TEXT = 20_000  # characters of one text in an answer
MAX_NAME = 500
MAX_ITEMS = 2_000  # entries of a list or an object in an answer
_MAX_DEPTH = 8
_MAX_INTEGER = 1 << 53  # smaller ones are read exactly by a browser

Json = dict[str, Any]
Row = Mapping[str, Any]


def clean(text: str) -> str:
    """Without lone surrogates, which neither SQLite nor UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()


def cut(text: str, most: int) -> str:
    """Cut a text, and say its length if it was longer."""
    if len(text) <= most:
        return clean(text)
    return f"{clean(text[:most])}… [cut: {len(text):,} characters]"


def plain(value: Any, *, most: int = MAX_TEXT, depth: int = 0) -> Any:
    """A value for an answer: JSON types, finite numbers, bounded in size and depth; a text has up
    to ``most`` characters."""
    if isinstance(value, str):
        return cut(value, most)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if finite(value) is not None and abs(value) < _MAX_INTEGER else finite(value)
    if depth == _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        pairs = list(value.items())[:MAX_ITEMS]
        return {
            cut(str(key), MAX_NAME): plain(one, most=most, depth=depth + 1) for key, one in pairs
        }
    if isinstance(value, list | tuple):
        return [plain(one, most=most, depth=depth + 1) for one in value[:MAX_ITEMS]]
    return cut(str(value), MAX_NAME)


def name_of(value: Any) -> str:
    return cut(value, MAX_NAME) if isinstance(value, str) else ""


def integer(value: Any) -> int | None:
    is_int = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INTEGER
    return value if is_int else None


def integers(value: Any) -> list[int]:
    return [one for one in items(value) if integer(one) is not None]


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def dicts(value: Any) -> list[Json]:
    return [one for one in items(value) if isinstance(one, dict)]


def at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None
