"""Checks of single fields: type, value, text.

Every number of every configuration class has a rule in `rules`; a field without one is an error of
the program (`KeyError`), so that no new field goes unchecked. Relations between fields are checked
elsewhere, on a configuration in which `with_defaults_for` has replaced the wrong fields.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchtitan_rl.config.checks.rules import RULES, Bounds
from torchtitan_rl.rollout.task import Task

_C = TypeVar("_C")

_ANY_NUMBER = Bounds(least=-1e300, most=1e300, fix="a finite number")
_MAY_BE_EMPTY = (
    "endpoint.tool_call_parser",
    "endpoint.reasoning_parser",
    "endpoint.chat_template",
    "launch.hosts",
    "launch.address",
    "launch.interface",
    "trainer.loss.function",
)


def field_errors(
    config: Any, prefix: str = "", *, rules: Mapping[type, Mapping[str, Bounds]] | None = RULES
) -> dict[str, str]:
    """One message per wrong field, by its dotted name, nested configurations included.

    Without ``rules``, as in a task and what it consists of, only the types are checked, and that
    numbers are finite; `Task.errors` checks the rest. A task's texts may be prompts of any form.
    """
    kind: Any = type(config)
    hints = _hints(kind)
    if isinstance(config, Task):
        rules = None
    own = None if rules is None else rules.get(type(config), {})
    errors: dict[str, str] = {}
    for field in dataclasses.fields(config):
        name, value, hint = f"{prefix}{field.name}", getattr(config, field.name), hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, hint):
            errors |= field_errors(value, f"{name}.", rules=rules)
        elif get_origin(hint) is dict and _fits(hint, value):
            for key, item in value.items():
                if dataclasses.is_dataclass(item):
                    errors |= field_errors(item, f"{name}.{key}.", rules=rules)
        elif fix := _type_error(hint, value) or _value_error(own, field.name, name, value):
            errors[name] = f"{name} is {_shown(value)}: {fix}"
    return errors


def with_defaults_for(config: _C, wrong: Collection[str], prefix: str = "") -> _C:
    """``config`` with the fields of these dotted names at their classes' defaults, as far as they
    have one."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if name in wrong:
            if field.default is not dataclasses.MISSING:
                changes[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                changes[field.name] = field.default_factory()
        elif dataclasses.is_dataclass(value) and any(one.startswith(f"{name}.") for one in wrong):
            changes[field.name] = with_defaults_for(value, wrong, f"{name}.")
    return dataclasses.replace(config, **changes) if changes else config  # type: ignore[type-var]


def but_about(wrong: Collection[str], errors: Iterable[str]) -> list[str]:
    """The messages that name none of these fields, which have messages of their own."""
    names = "|".join(map(re.escape, wrong))
    naming = re.compile(rf"(?<![\w.])(?:{names})(?!\w|\.\w)")
    return [error for error in errors if not wrong or not naming.search(error)]


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind)
    except NameError:  # a task whose types are imported for type checkers only
        return {field.name: Any for field in dataclasses.fields(kind)}


def _value_error(
    rules: Mapping[str, Bounds] | None, field: str, name: str, value: Any
) -> str | None:
    """For a value of the right type."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        bounds = _ANY_NUMBER if rules is None else rules[field]
        if fix := bounds.error(number):
            return fix
    if isinstance(value, str | Path) and rules is not None:
        return _text_error(str(value), may_be_empty=name in _MAY_BE_EMPTY)
    return None


def _text_error(text: str, *, may_be_empty: bool) -> str | None:
    if not text.strip() and not may_be_empty:
        return "give one that is not empty"
    if not text.isprintable():
        return "give one without line breaks and other control characters"
    return None


def _type_error(hint: Any, value: Any) -> str | None:
    """What to give instead, or None."""
    if _fits(hint, value):
        return None
    return f"give {_describe(hint)}"


def _fits(hint: Any, value: Any) -> bool:
    origin, choices = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in choices
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(choices[0], key) and _fits(choices[1], item) for key, item in value.items()
        )
    if origin in (Union, types.UnionType):
        return any(_fits(choice, value) for choice in choices)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(choices) == 2 and choices[1] is Ellipsis:
            return all(_fits(choices[0], one) for one in value)
        return len(value) == len(choices) and all(map(_fits, choices, value))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, choices))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in choices)
    if origin is tuple:
        return "a tuple" if Ellipsis in choices else f"a tuple of {len(choices)} values"
    if origin is dict:
        return "a dict by name"
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}
    return names.get(hint) or ("None" if hint is type(None) else f"a {hint.__name__}")


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, int | float | Path) else repr(value)
    return text if text.isprintable() else repr(text)
