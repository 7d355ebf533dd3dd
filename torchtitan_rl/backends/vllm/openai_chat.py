"""vLLM's classes for chats, completions and Anthropic's messages, with the differences that
`openai.py` lists. A refusal has the message of the controller.

vLLM translates Anthropic's API (`/v1/messages`) to a chat and back; `anthropic_error` converts
errors. A call whose arguments are not a JSON object, which a policy that samples freely may write,
cannot be expressed there, and is returned as text. This is known only when the call is complete, so
the calls of a stream are held until its end.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
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
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput

from torchtitan_rl.backends.vllm.openai_constraints import call_mark, is_json_object, readable_calls
from torchtitan_rl.backends.vllm.openai_core import RefusedRequest
from torchtitan_rl.serving.errors import anthropic_error
from torchtitan_rl.serving.middleware import close_at_end

_NO_BEAMS = "beam search is not served"
LAST_OF_CHOICE = '"finish_reason":"'  # in a choice's last chunk; null in its other chunks
_VLLMS_PARSER_OPTION = "--tool-call-parser to be set"  # in vLLM's refusal of a chat with tools
_NO_PARSER = (
    "tools need endpoint.tool_call_parser, which is not set: start the server with "
    "--endpoint.tool-call-parser and the parser of the policy's calls, such as hermes"
)


class AnswerStream:
    """A streamed answer whose first output is awaited before the response begins."""

    def __init__(self, outputs: AsyncIterator[Any]) -> None:
        self.chunks: AsyncIterator[str]
        self._outputs = outputs
        self._first: list[Any] = []

    async def begin(self) -> AsyncIterator[str]:
        """Return the chunks after the first output; raise an error that comes before it."""
        close_at_end(self._close)
        async for output in self._outputs:
            self._first.append(output)
            break
        return self.chunks

    async def _close(self) -> None:
        for stream in (self.chunks, self._outputs):
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    async def outputs(self) -> AsyncGenerator[Any, None]:
        for output in self._first:
            yield output
        async for output in self._outputs:
            yield output


class _Versions:
    """Collects the policy versions of each choice of one answer; vLLM reports them with a choice's
    last token."""

    def __init__(self, num_choices: int = 1) -> None:
        """``num_choices``: of each prompt."""
        self._num_choices = num_choices
        self._runs: dict[int, list[list[int]]] = {}
        self.texts: defaultdict[int, str] = defaultdict(str)  # as sampled

    def note(self, prompt: int, output: CompletionOutput) -> None:
        if output.weight_versions is not None:
            runs = [[span.start, int(span.version)] for span in output.weight_versions]
            self._runs[prompt * self._num_choices + output.index] = runs

    async def noted(self, outputs: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Pass on request outputs (or pairs with a prompt's index), and collect their versions."""
        async for item in outputs:
            prompt, result = item if isinstance(item, tuple) else (0, item)
            for output in result.outputs:
                self.note(prompt, output)
                self.texts[output.index] += output.text
            yield item

    def add_to(self, choices: list[Any]) -> None:
        for choice in choices:
            choice.policy_versions = self._runs.get(choice.index, [])

    async def added(self, chunks: AsyncIterator[str]) -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            yield self._with_versions(chunk) if LAST_OF_CHOICE in chunk else chunk

    def _with_versions(self, chunk: str) -> str:
        body = json.loads(chunk.removeprefix("data: "))
        for choice in body["choices"]:
            if choice.get("finish_reason"):
                choice["policy_versions"] = self._runs.get(choice["index"], [])
        return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


class RefusalErrors:
    """Mixin for vLLM's serving classes: formats a refusal that comes after a stream has begun."""

    def create_streaming_error_response(self, message: Any, *args: Any, **options: Any) -> str:
        if isinstance(message, RefusedRequest):
            return json.dumps(message.refusal.body())
        answer: str = super().create_streaming_error_response(message, *args, **options)  # type: ignore[misc]
        return answer


class Chat(RefusalErrors, OpenAIServingChat):
    parser_cls: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser_cls = readable_calls(self.parser_cls)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        if request.use_beam_search:
            return self.create_error_response(_NO_BEAMS, param="use_beam_search")
        self.engine_client.constraints.admit(request)
        answer = await super().create_chat_completion(request, raw_request)
        if isinstance(answer, ErrorResponse) and _VLLMS_PARSER_OPTION in answer.error.message:
            return self.create_error_response(_NO_PARSER, param="tools")
        return await answer.begin() if isinstance(answer, AnswerStream) else answer

    async def chat_completion_full_generator(
        self, request: Any, outputs: AsyncIterator[Any], *args: Any, **options: Any
    ) -> Any:
        versions = _Versions()
        answer = await super().chat_completion_full_generator(
            request, versions.noted(outputs), *args, **options
        )
        for choice in getattr(answer, "choices", ()):  # an error has none
            message = choice.message
            self.engine_client.constraints.note_answer(
                request,
                arguments=[call.function.arguments for call in message.tool_calls or ()],
                text=message.content or "",
                mark=call_mark(self.parser_cls),
            )
        if request.return_token_ids and hasattr(answer, "choices"):
            versions.add_to(answer.choices)
        return answer

    def chat_completion_stream_generator(
        self, request: Any, outputs: AsyncIterator[Any], *args: Any, **options: Any
    ) -> AnswerStream:
        stream, versions = AnswerStream(outputs), _Versions()
        noted = versions.noted(stream.outputs())
        chunks = super().chat_completion_stream_generator(request, noted, *args, **options)
        if request.tools:
            chunks = self._noted_calls(request, chunks, versions.texts)
        stream.chunks = versions.added(chunks) if request.return_token_ids else chunks
        return stream

    async def _noted_calls(
        self, request: Any, chunks: AsyncIterator[str], texts: Mapping[int, str]
    ) -> AsyncGenerator[str, None]:
        calls: defaultdict[int, defaultdict[int, str]] = defaultdict(lambda: defaultdict(str))
        async for chunk in chunks:
            if '"tool_calls":[' in chunk or LAST_OF_CHOICE in chunk:
                for choice in json.loads(chunk.removeprefix("data: "))["choices"]:
                    arguments = calls[choice["index"]]
                    for call in choice["delta"].get("tool_calls") or ():
                        arguments[call["index"]] += call["function"].get("arguments") or ""
                    if choice.get("finish_reason"):
                        self.engine_client.constraints.note_answer(
                            request,
                            arguments=list(arguments.values()),
                            text=texts[choice["index"]],
                            mark=call_mark(self.parser_cls),
                        )
            yield chunk


class Completions(RefusalErrors, OpenAIServingCompletion):
    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        if request.use_beam_search:
            return self.create_error_response(_NO_BEAMS, param="use_beam_search")
        self.engine_client.constraints.admit(request)
        answer = await super().create_completion(request, raw_request)
        return await answer.begin() if isinstance(answer, AnswerStream) else answer

    def request_output_to_completion_response(
        self, results: list[Any], request: Any, *args: Any, **options: Any
    ) -> Any:
        answer = super().request_output_to_completion_response(results, request, *args, **options)
        if request.return_token_ids:
            versions = _Versions(request.n or 1)
            for prompt, result in enumerate(results):
                for output in result.outputs:
                    versions.note(prompt, output)
            versions.add_to(answer.choices)
        return answer

    def completion_stream_generator(
        self, request: Any, prompts: Any, outputs: AsyncIterator[Any], *args: Any, **options: Any
    ) -> AnswerStream:
        stream, versions = AnswerStream(outputs), _Versions(request.n or 1)
        chunks = super().completion_stream_generator(
            request, prompts, versions.noted(stream.outputs()), *args, **options
        )
        stream.chunks = versions.added(chunks) if request.return_token_ids else chunks
        return stream


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicErrorResponse} for status in (400, 401, 404, 413, 429, 503)
}
_STREAMED_ERROR = 'data: {"error":'


class _CappedChat(ChatCompletionRequest):
    """A chat request whose ``max_tokens`` may exceed the free context, because in Anthropic's API
    ``max_tokens`` is only an upper bound."""

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
    """Raise a VLLMValidationError if a required tool does not exist. vLLM checks this only in chat
    requests that it parses."""
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
    call = calls.setdefault(part["index"], {**part, "function": {"arguments": ""}})
    function = part.get("function") or {}
    call["function"]["arguments"] += function.get("arguments") or ""
    if function.get("name"):
        call["function"]["name"] = function["name"]


def _finish(choice: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    """Add all calls of a stream to a choice of its last chunk."""
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
    """Return the calls that Anthropic's API can express, and the arguments of the others.
    ``is_cut``: by the length limit, so the last call's may be only the beginning of an object,
    which clients accept in streams."""
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
    """If a call was required, vLLM reports "tool_calls" even for an answer without one."""
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
