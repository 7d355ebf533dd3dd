"""The names of vLLM's parsers, read from its source: importing vLLM takes seconds, and a wrong name
is to be told before a process starts.

Where vLLM is not installed, or keeps its names elsewhere, nothing is known here; the endpoint's
process checks them in any case.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from torchtitan_rl.serving.config import EndpointConfig

_TABLES = {
    "tool_call_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}


def parser_errors(endpoint: EndpointConfig) -> list[str]:
    """A message for each parser that vLLM does not have."""
    errors = []
    for field in _TABLES:
        name, known = getattr(endpoint, field), known_parsers(field)
        if name and known and name not in known:
            errors.append(f"endpoint.{field} is {name!r}: vLLM has {', '.join(sorted(known))}")
    return errors


@cache
def known_parsers(field: str) -> frozenset[str]:
    """Empty where they are not to be found."""
    package, table = _TABLES[field]
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    source = Path(found.origin).parent / package / "__init__.py"
    try:
        statements = ast.parse(source.read_text()).body
    except (OSError, SyntaxError):
        return frozenset()
    for statement in statements:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Dict)
            and any(isinstance(name, ast.Name) and name.id == table for name in statement.targets)
        ):
            keys = statement.value.keys
            return frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))
    return frozenset()
