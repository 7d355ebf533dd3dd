"""What must hold for the endpoint's address, keys, chat template and parsers before it starts."""

from __future__ import annotations

import ast
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.config import EndpointConfig, Keys, listen

_TABLES = {
    "tool_call_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}


def endpoint_errors(endpoint: EndpointConfig, keys: Keys) -> list[str]:
    """One message per error. The port is opened and closed again."""
    errors = []
    if endpoint.chat_template and (message := template_error(endpoint.chat_template)):
        errors.append(f"endpoint.chat_template is {endpoint.chat_template}: {message}")
    for field in _TABLES:
        name, known = getattr(endpoint, field), known_parsers(field)
        if name and known and name not in known:
            errors.append(f"endpoint.{field} is {name!r}: vLLM has {', '.join(sorted(known))}")
    try:
        listen(endpoint.host, endpoint.port).close()
    except EndpointLostError as error:
        return [*errors, str(error)]  # it is not known who could reach it
    return errors + keys.errors(endpoint.host)


def template_error(path: str) -> str:
    """What is wrong with the template in a file, in one line; empty where nothing is."""
    # With the tags that transformers adds to Jinja's own.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if not os.path.isfile(path):  # which is False for names that no file can have
        return (
            "there is no such file; give a Jinja template, or leave it out for the tokenizer's own"
        )
    try:
        _compile_jinja_template(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        return f"it is not a chat template in Jinja: {error}"
    return ""


@cache
def known_parsers(field: str) -> frozenset[str]:
    """vLLM's names of parsers, read from its source, since importing vLLM takes seconds. Empty
    where they are not found."""
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
