"""The lines of a prompts file and of its answers (JSONL), without any I/O.

A line has ``prompt`` (text), ``prompt_token_ids`` or ``messages`` (a conversation, rendered by the
model's chat template), and may have ``id`` and any field of `SamplingParams`; ``stop`` may be one
string. Each line gets one answer: a completion, or an object with ``error``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.types import Completion, GenerationRequest, SamplingParams

_FLOATS = ("temperature", "top_p", "min_p")
_INTEGERS = ("max_tokens", "top_k", "min_tokens", "seed")
_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_FIELDS = {"id", *_PROMPTS, "stop", "stop_token_ids", "ignore_eos", *_FLOATS, *_INTEGERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One line: ``name`` is its id, or its number from 1; ``request`` or ``error`` is None."""

    name: str | int
    request: GenerationRequest | None = None
    error: str | None = None


def parse_line(
    text: str,
    number: int,
    *,
    defaults: SamplingParams,
    encode: Callable[[str], list[int]],
    render: Callable[[list[Any]], Sequence[int]],
) -> PromptLine:
    """Read line ``number``. A error in it is its answer, never an exception.

    Args:
        render: tokens of a conversation, and of the header of the answer; may raise anything.
    """
    name: str | int = number
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise InvalidRequestError("the line is not a JSON object")
        name = _name(fields.get("id", number))
        request = GenerationRequest(
            # Ids of a file may repeat; those of requests may not.
            request_id=f"line-{number}",
            prompt_token_ids=_prompt(fields, encode, render),
            sampling=_sampling(fields, defaults),
        )
    except json.JSONDecodeError as error:
        return PromptLine(name=name, error=f"line {number} is not JSON: {error}")
    except InvalidRequestError as error:
        return PromptLine(name=name, error=f"line {number}: {error}")
    return PromptLine(name=name, request=request)


def format_completion(
    name: str | int, completion: Completion, decode: Callable[[list[int]], str]
) -> str:
    """The answer's line. A logprob that is not finite becomes null."""
    return json.dumps(
        {
            "id": name,
            "token_ids": completion.token_ids,
            "text": decode(list(completion.token_ids)),
            "logprobs": [value if math.isfinite(value) else None for value in completion.logprobs],
            "versions": completion.versions,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "metrics": asdict(completion.metrics) if completion.metrics else None,
        },
        ensure_ascii=False,
    )


def format_error(name: str | int, error: str) -> str:
    return json.dumps({"id": name, "error": error}, ensure_ascii=False)


def _name(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidRequestError(f"id = {value!r}: use a string or an integer")
    return value


def _prompt(
    fields: Mapping[str, Any],
    encode: Callable[[str], list[int]],
    render: Callable[[list[Any]], Sequence[int]],
) -> tuple[int, ...]:
    given = [name for name in _PROMPTS if name in fields]
    if len(given) != 1:
        raise InvalidRequestError("give one of prompt (text), prompt_token_ids and messages")
    value = fields[given[0]]
    match given[0]:
        case "prompt_token_ids":
            return _token_ids("prompt_token_ids", value)
        case "messages":
            return _rendered(value, render)
    if not isinstance(value, str):
        raise InvalidRequestError(f"prompt = {value!r}: use a string")
    return tuple(encode(value))


def _rendered(messages: Any, render: Callable[[list[Any]], Sequence[int]]) -> tuple[int, ...]:
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise InvalidRequestError(
            f'messages = {messages!r}: use a list such as [{{"role": "user", "content": "Hi"}}]'
        )
    try:
        return tuple(render(messages))
    except Exception as error:  # of the model's template
        raise InvalidRequestError(f"messages: the chat template refuses them: {error}") from error


def _is_message(value: Any) -> bool:
    """An assistant that only calls tools needs no content."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def _sampling(fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    if unknown := sorted(set(fields) - _FIELDS):
        raise InvalidRequestError(f"unknown fields {unknown}; known are {sorted(_FIELDS)}")
    changes: dict[str, Any] = {}
    for field in fields.keys() & {*_INTEGERS, *_FLOATS}:
        value = fields[field]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_none = field == "seed" and value is None
        if not (is_none or (is_number and (field in _FLOATS or isinstance(value, int)))):
            kind = "a number" if field in _FLOATS else "an integer"
            raise InvalidRequestError(f"{field} = {value!r}: use {kind}")
        changes[field] = float(value) if field in _FLOATS else value
    if "stop" in fields:
        stop = fields["stop"] if isinstance(fields["stop"], list) else [fields["stop"]]
        if not all(isinstance(one, str) and one for one in stop):
            raise InvalidRequestError(f"stop = {fields['stop']!r}: use a string or a list of them")
        changes["stop"] = tuple(stop)
    if "stop_token_ids" in fields:
        changes["stop_token_ids"] = _token_ids("stop_token_ids", fields["stop_token_ids"])
    if "ignore_eos" in fields:
        if not isinstance(fields["ignore_eos"], bool):
            raise InvalidRequestError(f"ignore_eos = {fields['ignore_eos']!r}: use true or false")
        changes["ignore_eos"] = fields["ignore_eos"]
    return replace(defaults, **changes)


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise InvalidRequestError(f"{field} = {value!r}: use a list of integers")
    return tuple(value)
