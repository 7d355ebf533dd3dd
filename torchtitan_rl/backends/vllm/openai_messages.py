"""`/v1/messages`: Anthropic's API, which vLLM translates to a chat and back.

Errors leave as OpenAI error objects; `serving.anthropic_errors` gives them Anthropic's shape.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
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

from torchtitan_rl.backends.vllm.openai_answers import Chat
from torchtitan_rl.backends.vllm.openai_constraints import is_json_object
from torchtitan_rl.serving.anthropic_errors import anthropic_error

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicErrorResponse} for status in (400, 401, 404, 413, 429, 503)
}
_STREAMED_ERROR = 'data: {"error":'


class _CappedChat(ChatCompletionRequest):
    """``max_tokens`` is a bound, as in Anthropic's API, where clients send more than fits."""

    def build_tok_params(self, model_config: Any) -> Any:
        unbound = self.model_copy(update={"max_tokens": None, "max_completion_tokens": None})
        return ChatCompletionRequest.build_tok_params(unbound, model_config)


class Messages(Chat, AnthropicServingMessages):
    @classmethod
    def to_chat_completion_request(cls, *args: Any, **options: Any) -> ChatCompletionRequest:
        request = super().to_chat_completion_request(*args, **options)
        request.thinking_token_budget = None  # how long to think is the policy's
        return _CappedChat.model_construct(request.model_fields_set, **request.__dict__)

    def messages_full_converter(self, answer: Any) -> AnthropicMessagesResponse:
        """A call whose arguments are no JSON object is text: a policy that samples freely may write
        one, and blocks of this API cannot have it."""
        message = answer.choices[0].message
        calls = message.tool_calls or []
        message.tool_calls = [call for call in calls if is_json_object(call.function.arguments)]
        if len(message.tool_calls) < len(calls):
            broken = [call.function.arguments for call in calls if call not in message.tool_calls]
            message.content = "".join([message.content or "", *broken])
        return super().messages_full_converter(answer)

    async def message_stream_converter(
        self, chunks: AsyncIterator[str]
    ) -> AsyncGenerator[str, None]:
        """The events of a stream; an error ends it as an event of its own."""
        error = ""

        async def until_error() -> AsyncGenerator[str, None]:
            nonlocal error
            async for chunk in chunks:
                if chunk.startswith(_STREAMED_ERROR):
                    error = chunk.removeprefix("data: ")
                    return
                yield chunk

        async for event in super().message_stream_converter(until_error()):
            yield event
        if error:
            found = json.loads(error)["error"]
            yield f"event: error\ndata: {json.dumps(anthropic_error(found, 500))}\n\n"


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
