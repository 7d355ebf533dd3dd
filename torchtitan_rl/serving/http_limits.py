"""What a request may ask for, checked on its JSON before the app sees it.

The checks are about form and quantity only: text that is JSON in UTF-8 and can be written again
as such (no NaN, infinity, lone surrogate or integer beyond 64 bits: each of these has made some
handler fail with a 500), nesting, how many completions and tokens it multiplies to, and how often
a JSON schema may have something repeated (``minItems`` and its like: a grammar library unrolls a
billion of them until the process is out of memory). What the fields mean is the app's to judge,
but for media that it would drop (`http_text_only`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from torchtitan_rl.serving.http_errors import HttpError
from torchtitan_rl.serving.http_text_only import check_text_only

_MAX_INTEGER = (1 << 64) - 1
_MIN_INTEGER = -(1 << 63)
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
_REPETITIONS = tuple(
    low + what for low in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")
)
_MAX_REPETITIONS = 100_000  # no completion has as many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """``max_n`` bounds the completions of one request, ``n`` times its prompts."""

    max_body_bytes: int = 4 << 20
    max_n: int = 16
    max_tokens: int = 0  # 0: what the context has room for
    max_depth: int = 64  # of the JSON


def check_request(body: bytes, limits: RequestLimits) -> None:
    """Raises:
    HttpError: 400, naming the field where it is one.
    """
    content = parse_json(body, max_depth=limits.max_depth)
    if not isinstance(content, dict):
        return
    check_text_only(content)
    _check_constraints(content.get("structured_outputs"), limits.max_depth)
    n = _integer(content, "n")
    num_completions = (1 if n is None else n) * _num_prompts(content)
    if num_completions > limits.max_n:
        raise _too_large("n", f"n times the prompts is {num_completions}", limits.max_n)
    for name in _TOKEN_LIMITS:
        value = _integer(content, name)
        if limits.max_tokens and value is not None and value > limits.max_tokens:
            raise _too_large(name, f"{name} is {value}", limits.max_tokens)


def parse_json(body: bytes, *, max_depth: int) -> Any:
    """The JSON value of ``body``.

    Raises:
        HttpError: 400, because it is none, is nested too deeply, or cannot be written as JSON.
    """
    try:
        text = body.decode()
        content = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:
        raise _bad_json(str(error)) from None
    _check_values(content, max_depth)
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(content)
    return content


def _check_values(content: Any, max_depth: int) -> None:
    level, depth = [content], 0
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                if depth == max_depth:
                    raise _too_deep(max_depth)
                below.extend(value.values() if isinstance(value, dict) else value)
                if isinstance(value, dict):
                    _check_repetitions(value)
            elif isinstance(value, float):
                if value - value != 0:  # infinity: a number such as 1e999
                    raise _bad_json("a number is too large")
            elif isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
                raise _bad_json("an integer has more than 64 bits")
        level, depth = below, depth + 1


def _check_constraints(constraints: Any, max_depth: int) -> None:
    """A schema may also be a string there."""
    if not isinstance(constraints, dict):
        return
    for text in (constraints.get("json"), constraints.get("structural_tag")):
        if isinstance(text, str):
            try:
                schema = json.loads(text)
            except RecursionError:
                raise _too_deep(max_depth) from None
            except ValueError:
                continue  # the app says so
            _check_values(schema, max_depth)


def _check_repetitions(schema: dict[str, Any]) -> None:
    for name in _REPETITIONS:
        value = schema.get(name)
        if isinstance(value, int | float) and value > _MAX_REPETITIONS:
            raise _too_large(name, f"{name} is {value}", _MAX_REPETITIONS)


def _check_surrogates(content: Any) -> None:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad_json("a string has half of a surrogate pair") from None


def _num_prompts(content: dict[str, Any]) -> int:
    """``prompt`` may be one prompt, of text or token ids, or a list of either; ``messages`` of the
    batched route is a list of conversations."""
    counts = [1]
    for name in ("prompt", "messages"):
        value = content.get(name)
        if isinstance(value, list) and not all(isinstance(item, int) for item in value):
            batched = name == "prompt" or any(isinstance(item, list) for item in value)
            counts.append(len(value) if batched else 1)
    return max(counts)


def _integer(content: dict[str, Any], name: str) -> int | None:
    """A limited field is an integer or absent: the app would also take "5" and 5.0 for one, which
    would pass by the limit."""
    value = content.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise HttpError(400, f"{name} must be an integer.", code="invalid_type", param=name)


def _too_large(name: str, what: str, limit: int) -> HttpError:
    message = f"{what}; this server allows {limit}."
    return HttpError(400, message, code="limit_exceeded", param=name)


def _too_deep(max_depth: int) -> HttpError:
    return HttpError(
        400, f"The JSON is nested more than {max_depth} deep.", code="nested_too_deeply"
    )


def _bad_json(why: str) -> HttpError:
    return HttpError(400, f"The body is not JSON in UTF-8: {why}.", code="invalid_json")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
