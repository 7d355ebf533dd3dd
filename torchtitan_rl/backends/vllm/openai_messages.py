"""`/v1/messages`: Anthropic's API, which vLLM translates to a chat and back.

Errors leave this module as OpenAI error objects; `anthropic_error` converts them to Anthropic's
format.

A policy that samples freely may write a call whose arguments are not a JSON object. Blocks of this
API cannot hold such a call, so it is returned as text. Calls of a stream are therefore held until
the end of the stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic_core import from_json
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicErrorResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation
from vllm.exceptions import VLLMValidationError

from torchtitan_rl.backends.vllm.openai_answers import LAST_OF_CHOICE, Chat
from torchtitan_rl.backends.vllm.openai_constraints import is_json_object
from torchtitan_rl.serving.errors import anthropic_error

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicErrorResponse} for status in (400, 401, 404, 413, 429, 503)
}
_STREAMED_ERROR = 'data: {"error":'


class _CappedChat(ChatCompletionRequest):
    """A chat request whose ``max_tokens`` may exceed the free context: in Anthropic's API it is
    only an upper bound."""

    def build_tok_params(self, model_config: Any) -> Any:
        unbound = self.model_copy(update={"max_tokens": None, "max_completion_tokens": None})
        return ChatCompletionRequest.build_tok_params(unbound, model_config)


class Messages(Chat, AnthropicServingMessages):
    @classmethod
    def to_chat_completion_request(cls, *args: Any, **options: Any) -> ChatCompletionRequest:
        request = super().to_chat_completion_request(*args, **options)
        request.thinking_token_budget = None  # the policy decides how long it reasons
        _check_tool_choice(request)
        return _CappedChat.model_construct(request.model_fields_set, **request.__dict__)

    def messages_full_converter(self, answer: Any) -> AnthropicMessagesResponse:
        choice = answer.choices[0]
        message = choice.message
        calls = message.tool_calls or []
        whole, broken = _split(calls, [call.function.arguments for call in calls])
        message.tool_calls = whole
        message.content = "".join([message.content or "", *broken])
        choice.finish_reason = _reason(choice.finish_reason, whole)
        return super().messages_full_converter(answer)

    async def message_stream_converter(
        self, chunks: AsyncIterator[str]
    ) -> AsyncGenerator[str, None]:
        """Yield the events of a stream; an error is the last event."""
        error = ""

        async def until_error() -> AsyncGenerator[str, None]:
            nonlocal error
            async for chunk in chunks:
                if chunk.startswith(_STREAMED_ERROR):
                    error = chunk.removeprefix("data: ")
                    return
                yield chunk

        async for event in super().message_stream_converter(_with_whole_calls(until_error())):
            yield event
        if error:
            found = json.loads(error)["error"]
            yield f"event: error\ndata: {json.dumps(anthropic_error(found, 500))}\n\n"


def _check_tool_choice(request: ChatCompletionRequest) -> None:
    """Check that a required tool exists. vLLM checks this only in chat requests that it parses.

    Raises:
        VLLMValidationError: the request requires a call, and the tool does not exist.
    """
    names = [tool.function.name for tool in request.tools or ()]
    choice = request.tool_choice
    named = getattr(getattr(choice, "function", None), "name", None)
    if (choice == "required" and not names) or (named is not None and named not in names):
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise VLLMValidationError(message, parameter="tool_choice")


async def _with_whole_calls(chunks: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """Yield the chunks of a streamed chat, with all calls moved to the choice's last chunk."""
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in chunks:
        if '"tool_calls":[' in chunk or LAST_OF_CHOICE in chunk:
            body = json.loads(chunk.removeprefix("data: "))
            for choice in body["choices"]:
                for part in choice["delta"].pop("tool_calls", None) or ():
                    _add(calls, part)
                if choice.get("finish_reason"):
                    _finish(choice, list(calls.values()))
            chunk = f"data: {json.dumps(body)}\n\n"
        yield chunk


def _add(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a streamed part of a call to ``calls``, which are keyed by index."""
    call = calls.setdefault(part["index"], {**part, "function": {"arguments": ""}})
    function = part.get("function") or {}
    call["function"]["arguments"] += function.get("arguments") or ""
    if function.get("name"):
        call["function"]["name"] = function["name"]


def _finish(choice: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    """Add all calls of a stream to ``choice``, which is of its last chunk."""
    delta = choice["delta"]
    for call in calls:
        call["function"]["arguments"] = call["function"]["arguments"] or "{}"
    arguments = [call["function"]["arguments"] for call in calls]
    whole, broken = _split(calls, arguments, is_cut=choice["finish_reason"] == "length")
    delta["content"] = "".join([delta.get("content") or "", *broken])
    delta["tool_calls"] = whole
    choice["finish_reason"] = _reason(choice["finish_reason"], whole)


def _split(
    calls: Sequence[Any], arguments: Sequence[str], *, is_cut: bool = False
) -> tuple[list[Any], list[str]]:
    """Return the calls that a block can hold, and the arguments of the other calls as texts.

    ``is_cut``: the length limit cut the answer, so the last call may be the beginning of an object.
    Clients accept this in streams.
    """
    fits = [is_json_object(text) for text in arguments]
    if is_cut and calls:
        fits[-1] = fits[-1] or _begins_object(arguments[-1])
    whole = [call for call, does in zip(calls, fits, strict=True) if does]
    return whole, [text for text, does in zip(arguments, fits, strict=True) if not does]


def _begins_object(text: str) -> bool:
    try:
        return isinstance(from_json(text, allow_inf_nan=False, allow_partial=True), dict)
    except ValueError:
        return False


def _reason(reason: str | None, calls: Sequence[Any]) -> str | None:
    """Return the finish reason of a choice. vLLM reports "tool_calls" for each required call, even
    if there is none."""
    return "stop" if reason == "tool_calls" and not calls else reason


def messages_routes(messages: Messages) -> APIRouter:
    router = APIRouter(
        tags=["messages"], dependencies=[Depends(validate_json_request)], responses=_ERRORS
    )

    @router.post("/v1/messages", response_model=AnthropicMessagesResponse)
    @with_cancellation
    async def create_message(request: AnthropicMessagesRequest, raw_request: Request) -> Response:
        """An answer in Anthropic's form."""
        answer = await messages.create_messages(request, raw_request)
        if isinstance(answer, ErrorResponse | AnthropicMessagesResponse):
            return _whole(answer)
        return StreamingResponse(answer, media_type="text/event-stream")

    @router.post("/v1/messages/count_tokens", response_model=AnthropicCountTokensResponse)
    @with_cancellation
    async def count_tokens(request: AnthropicCountTokensRequest, raw_request: Request) -> Response:
        """The number of tokens of a prompt."""
        return _whole(await messages.count_tokens(request, raw_request))

    return router


def _whole(answer: Any) -> Response:
    status = answer.error.code if isinstance(answer, ErrorResponse) else 200
    return JSONResponse(answer.model_dump(exclude_none=True), status)
