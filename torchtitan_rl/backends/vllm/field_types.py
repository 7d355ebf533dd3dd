"""Checks names and types of options for vLLM's ``EngineArgs``: reads a JSON object from stdin, and
prints a JSON list of errors. `config/vllm_options.py` runs this module in a child process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from enum import EnumMeta
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

_MOST_SHOWN = 200  # characters of a value in a message


def option_errors(kind: Any, options: Mapping[str, Any], prefix: str) -> list[str]:
    """One message of one line for each option that is no field of the dataclass ``kind``, or has a
    value of another type or outside of the field's bounds."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    errors = []
    for name, value in options.items():
        if name not in fields or name.startswith("_"):
            similar = get_close_matches(name, fields, n=3)
            hint = f" (similar: {', '.join(similar)})" if similar else ""
            what = prefix + _shown(name).strip('"')
            errors.append(f"{what} is not a field of vLLM's {kind.__name__}{hint}")
        elif cause := _type_error(_bounded(fields[name], kind), value):
            errors.append(f"{prefix}{name} is {_shown(value)}: {' '.join(cause.split())}")
    return errors


def _shown(value: object) -> str:
    """A value as JSON, which escapes control characters, cut off."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _bounded(field: dataclasses.Field[Any], kind: Any) -> Any:
    hint = _resolved(field.type, kind)
    bounds = field.default.metadata if isinstance(field.default, FieldInfo) else ()
    return Annotated[hint, *bounds] if bounds else hint


def _resolved(hint: Any, kind: Any) -> Any:
    """Evaluate an annotation of ``kind``; any type, if it has names for type checkers alone."""
    try:
        holder = SimpleNamespace(__annotations__={"hint": hint})
        return get_type_hints(holder, vars(sys.modules[kind.__module__]))["hint"]
    except NameError:
        return Any


def _type_error(hint: Any, value: Any) -> str:
    enums = [one for one in (hint, *get_args(hint)) if isinstance(one, EnumMeta)]
    members = [name for one in enums for name in one.__members__]
    if members and isinstance(value, str):  # vLLM takes the names of an enum's members
        return "" if value.upper() in members else f"it must be one of {', '.join(members)}"
    try:
        _adapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        where = [".".join(map(str, one["loc"])) for one in error.errors()]
        causes = [one["msg"].replace("Input should be", "it must be") for one in error.errors()]
        return " or ".join(
            dict.fromkeys(
                f"{at}: {why}" if at else why for at, why in zip(where, causes, strict=True)
            )
        )
    return ""


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint)
    except PydanticUserError:  # it has types that pydantic does not know
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def main() -> None:
    options = json.load(sys.stdin)
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    errors = option_errors(EngineArgs, options, "")
    speculative = options.get("speculative_config")
    if isinstance(speculative, dict):
        errors += option_errors(SpeculativeConfig, speculative, "speculative_config.")
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
