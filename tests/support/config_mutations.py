"""Every field of a configuration, and wrong values for it, found from its type."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

HUGE = 10**400  # no float
_NUMBERS = (-1, 0, 1, 2**31, HUGE, math.nan, math.inf, 1e300)
_TEXTS = ("", " ", "..", "../../x", "a\nb", "\0", "x" * 5000, "/proc/no/such")
_WRONG_TYPES: tuple[Any, ...] = (None, "text", 1.5, True, [])


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of each field that is no configuration itself."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{name}.")
        else:
            yield name, hints[field.name]


def branches(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the fields that are configurations themselves."""
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield name
            yield from branches(value, f"{name}.")


def values_for(hint: Any) -> list[Any]:
    """Good and bad ones."""
    return [*_of_type(hint), *_WRONG_TYPES]


def with_value(config: Any, name: str, value: Any) -> Any:
    """``config`` with one field, by its dotted name, changed."""
    first, _, rest = name.partition(".")
    inner = with_value(getattr(config, first), rest, value) if rest else value
    return dataclasses.replace(config, **{first: inner})


def _of_type(hint: Any) -> list[Any]:
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [*choices, "zz", "", 3]
    if origin in (Union, types.UnionType):
        return [value for choice in choices for value in _of_type(choice)]
    if origin is tuple:
        return [*((bad,) * len(choices) for bad in _NUMBERS), (0.9,), ("a", "b")]
    if hint in (int, float):
        return list(_NUMBERS)
    if hint is bool:
        return [True, False]
    if hint is Path:
        return [Path(text) for text in _TEXTS if text] + ["/tmp/no-path"]
    return list(_TEXTS) if hint is str else []
