"""Applies, removes or refuses fields of requests that constrain the sampling.

Agent libraries mark tools as strict, require a call or send a schema; vLLM turns each of these into
a grammar. `EndpointConfig.constraints` decides whether constraints apply. With ``free``, the tool
parser finds the calls in the text that the policy wrote. If a required call is missing, the answer
is text and is counted.

Invariant: unless this option is ``constrained``, no request reaches an engine with a constraint.
This includes constraints that clients did not send: some tool parsers add a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.sampling_params import check_json_nesting
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from torchtitan_rl.serving.config import Constraints

MISSING_CALLS = "missing_calls"  # answers without a tool call where one was required
BROKEN_CALLS = "broken_calls"  # answers with a call whose arguments are not a JSON object

_SAMPLING_FIELDS = (
    "structured_outputs",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "ignore_eos",
)
_FREE_CHOICES = (None, "auto", "none")  # values of `tool_choice` that require no call
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # what UTF-8 cannot encode
_DEFAULTS = VllmSamplingParams()


class ConstraintPolicy:
    """Applies `EndpointConfig.constraints` to requests and to the sampling parameters for the
    engine. ``count`` increments a counter, given its name."""

    def __init__(self, option: Constraints, count: Callable[[str], None]) -> None:
        self._option = option
        self._count = count

    def admit(self, request: Any) -> None:
        """Prepare a parsed chat, text or Responses request. Raises VLLMValidationError: the request
        is refused."""
        fields = [] if self._option == "constrained" else list(constraining_fields(request))
        if fields and self._option == "refuse":
            message = (
                f"{fields[0]} constrains the sampling, which this server does not do "
                "(endpoint.constraints is 'refuse'): leave it out"
            )
            raise VLLMValidationError(message, parameter=fields[0])
        for name in fields:
            self._count(f"unconstrained/{name}")
        request.requires_call = "tool_choice" in fields
        if request.requires_call:
            # Otherwise vLLM would parse the whole text as the JSON of the call.
            request.tool_choice = "auto"

    def free(self, params: VllmSamplingParams) -> None:
        """Remove all constraints, unless the option is ``constrained``."""
        if self._option != "constrained":
            for name in _SAMPLING_FIELDS:
                setattr(params, name, getattr(_DEFAULTS, name))

    def note_answer(
        self, request: Any, *, arguments: Sequence[str], text: str = "", mark: str | None = None
    ) -> None:
        """Count an answer without a required call, and one with a broken call, with any option. The
        request must have been admitted.

        Args:
            arguments: the arguments of each call that the tool parser found.
            text: the answer, with or without the parsed calls.
            mark: the string with which a call begins. If the text contains more marks than there
                are parsed calls, the parser could not read one.
        """
        if request.requires_call and not arguments:
            self._count(MISSING_CALLS)
        if request.tools:
            has_unread = mark is not None and text.count(mark) > len(arguments)
            if has_unread or not all(map(is_json_object, arguments)):
                self._count(BROKEN_CALLS)


def refuse_unsupported_schema(params: VllmSamplingParams) -> None:
    """Raise `VLLMValidationError`, with the keywords, for a JSON schema that xgrammar does not
    support."""
    schema = params.structured_outputs and params.structured_outputs.json
    if not schema:
        return
    check_json_nesting(schema)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return  # vLLM's own message reports invalid JSON
    if has_xgrammar_unsupported_json_features(schema):
        keywords = " with ".join(_unsupported_keywords(schema))
        raise VLLMValidationError(
            f"the JSON schema has {keywords}, which is not supported here: leave it out"
        )


def _unsupported_keywords(schema: dict[str, Any]) -> list[str]:
    """Return the smallest set of keywords in the innermost unsupported part of the schema that
    xgrammar does not support together."""
    for value in schema.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict) and has_xgrammar_unsupported_json_features(part):
                return _unsupported_keywords(part)
    needed = dict(schema)
    for name in schema:
        rest = {key: value for key, value in needed.items() if key != name}
        if has_xgrammar_unsupported_json_features(rest):
            needed = rest
    return [name for name in needed if name != "type"]


def is_json_object(text: str) -> bool:
    """Whether ``text`` is a JSON object without NaN, infinity or unpaired surrogates."""
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict)


def readable_calls(parser_class: Any) -> Any:
    """Return a subclass of a vLLM parser that does not change what the policy wrote.

    - If UTF-8 cannot encode a call, all calls stay text: parsers replace the escape ``"\\ud800"``
      by an unpaired surrogate.
    - If a stream ends in the chunk that names the function, the call has no arguments; vLLM would
      add ``{}``.
    """
    if parser_class is None:
        return None

    class ReadableCalls(parser_class):
        def parse(self, text: str, request: Any, *args: Any, **options: Any) -> Any:
            parsed = super().parse(text, request, *args, **options)
            if not any(_SURROGATE.search(call.name + call.arguments) for call in parsed[2] or ()):
                return parsed
            without_tools = request.model_copy(update={"tool_choice": "none"})
            return super().parse(text, without_tools, *args, **options)

        def parse_delta(self, *args: Any, **options: Any) -> Any:
            delta = super().parse_delta(*args, **options)
            calls = getattr(self.tool_parser, "prev_tool_call_arr", ())
            if delta and delta.tool_calls and calls and "arguments" not in calls[-1]:
                last = delta.tool_calls[-1].function
                was_sent = self.tool_parser.streamed_args_for_tool[-1:] != [""]
                if last and last.arguments == "{}" and not was_sent:
                    last.arguments = None
            return delta

    return ReadableCalls


def call_mark(parser: Any) -> str | None:
    """Return the string with which a tool call begins; None if the parser class defines none."""
    mark = getattr(getattr(parser, "tool_parser_cls", None), "tool_call_start_token", None)
    return mark if isinstance(mark, str) else None


def constraining_fields(request: Any) -> Iterator[str]:
    for name in _SAMPLING_FIELDS:
        if getattr(request, name, None):
            yield name
    if _format_type(getattr(request, "response_format", None)) != "text":
        yield "response_format"
    if _format_type(getattr(getattr(request, "text", None), "format", None)) != "text":
        yield "text.format"
    choice = getattr(request, "tool_choice", None)
    if getattr(request, "tools", None) and choice != "none":
        if choice not in _FREE_CHOICES:
            yield "tool_choice"
        if any(getattr(getattr(tool, "function", tool), "strict", None) for tool in request.tools):
            yield "tools.strict"
        if request.parallel_tool_calls is False:
            yield "parallel_tool_calls"


def _format_type(form: Any) -> Any:
    return "text" if form is None else getattr(form, "type", "text")
