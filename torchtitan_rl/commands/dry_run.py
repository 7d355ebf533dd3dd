"""``--dry-run`` of a command: its plan, as lines for a person or with ``--json`` for a program."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torchtitan_rl.errors import ConfigError

_OPTIONS = ("--dry-run", "--json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a command's words ask for."""

    is_wanted: bool
    as_json: bool

    @classmethod
    def of(cls, words: Sequence[str]) -> tuple[DryRun, list[str]]:
        """And the other words.

        Raises:
            ConfigError: ``--json`` without ``--dry-run``.
        """
        is_wanted, as_json = (option in words for option in _OPTIONS)
        if as_json and not is_wanted:
            raise ConfigError("--json is of a plan: give --dry-run --json")
        rest = [word for word in words if word not in _OPTIONS]
        return cls(is_wanted=is_wanted, as_json=as_json), rest

    def planning(self) -> AbstractContextManager[Any]:
        """What a configuration or its task prints inside must not get into the JSON."""
        return redirect_stdout(sys.stderr) if self.as_json else nullcontext()

    def show(self, lines: str, document: Mapping[str, Any]) -> int:
        """Print the one or the other; returns the exit code."""
        print(json.dumps(plain(document), indent=2) if self.as_json else lines)
        return 0


def plain(value: Any) -> Any:
    """In the types of JSON: a dataclass as an object, what JSON has no word for as text.

    >>> from pathlib import PurePath
    >>> plain({"path": PurePath("a"), "sizes": (1, math.inf), "score": len})
    {'path': 'a', 'sizes': [1, 'inf'], 'score': 'builtins:len'}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)
