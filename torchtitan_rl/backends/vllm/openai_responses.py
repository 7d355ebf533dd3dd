"""`/v1/responses`: vLLM's class, over a bounded store of conversations.

vLLM's own store is never freed, and what it continues lacks the tool calls of earlier answers. So
`previous_response_id` is replaced by the conversation that it stands for, and vLLM sees a request
that brings all of its input.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from openai.types.responses import ResponseErrorEvent
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.utils import random_uuid

from torchtitan_rl.backends.vllm.openai_answers import AnswerStream, RefusalErrors
from torchtitan_rl.backends.vllm.openai_constraints import call_mark, readable_calls
from torchtitan_rl.backends.vllm.openai_core import RefusedRequest, session_of_request
from torchtitan_rl.serving.context import session_id
from torchtitan_rl.serving.messages import RefusedError
from torchtitan_rl.serving.response_store import ResponseStore

_UNSERVED = ("background", "conversation")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """What is kept of a request; ``items`` are its own input."""

    session: str | None
    items: list[Any]
    previous: str | None
    is_stored: bool


class Responses(RefusalErrors, OpenAIServingResponses):
    parser: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = readable_calls(self.parser)
        self.store = ResponseStore()

    async def create_responses(
        self, request: ResponsesRequest, raw_request: Request | None = None
    ) -> Any:
        for name in _UNSERVED:
            if getattr(request, name, None):
                raise VLLMValidationError(f"{name} is not served here", parameter=name)
        assert raw_request is not None
        session = session_of_request(self._get_session_id(request, raw_request))
        # Parsed anew: validation has replaced items of the body that FastAPI parsed.
        body = json.loads(await raw_request.body())
        request = self._with_conversation(request, body, session)
        self.engine_client.constraints.admit(request)
        answer = await super().create_responses(request, raw_request)
        return await answer.begin() if isinstance(answer, AnswerStream) else answer

    def _with_conversation(
        self, request: ResponsesRequest, body: dict[str, Any], session: str | None
    ) -> ResponsesRequest:
        items, previous, history = body["input"], request.previous_response_id, []
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if previous is not None:
            try:
                history = self.store.conversation(session, previous)
            except RefusedError as error:
                raise RefusedRequest(error.refusal) from error
        whole = [_with_one_text(item) for item in (*history, *items)]
        given = {name: value for name, value in body.items() if value is not None}
        if whole != items or len(given) < len(body):  # vLLM fails at nulls in some places
            given.pop("previous_response_id", None)
            request = ResponsesRequest.model_validate({**given, "input": whole})
        request.request_id = f"resp_{random_uuid()}"  # no client may choose that of another
        request.turn = _Turn(
            session=session, items=items, previous=previous, is_stored=bool(request.store)
        )
        request.store = False  # by vLLM
        return request

    async def responses_full_generator(
        self,
        request: ResponsesRequest,
        sampling_params: Any,
        outputs: AsyncIterator[Any],
        context: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Also called at the end of a stream."""
        answer = await super().responses_full_generator(
            request, sampling_params, outputs, context, *args, **options
        )
        if isinstance(answer, ResponsesResponse):
            turn = request.turn
            answer.previous_response_id = turn.previous
            calls = [item for item in answer.output if item.type == "function_call"]
            self.engine_client.constraints.note_answer(
                request,
                arguments=[call.arguments for call in calls],
                text=context.final_output.outputs[0].text,
                mark=call_mark(self.parser),
            )
            if turn.is_stored:
                response = answer.model_dump(mode="json", by_alias=True)
                self.store.keep(turn.session, response, turn.items, turn.previous)
        return answer

    def responses_stream_generator(
        self,
        request: ResponsesRequest,
        sampling_params: Any,
        outputs: AsyncIterator[Any],
        *args: Any,
        **options: Any,
    ) -> AnswerStream:
        stream = AnswerStream(outputs)
        events = super().responses_stream_generator(
            request, sampling_params, stream.outputs(), *args, **options
        )
        stream.chunks = _until_refused(events)
        return stream


def _with_one_text(item: Any) -> Any:
    """An assistant's message as one text: vLLM takes the first part, and fails without one."""
    if not (isinstance(item, dict) and item.get("role") == "assistant"):
        return item
    parts = item.get("content")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return item
    if len(parts) == 1 and "text" in parts[0]:
        return item
    texts = [part.get("text") or part.get("refusal") or "" for part in parts]
    return {**item, "content": "".join(map(str, texts))}


async def _until_refused(events: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    number = 0
    try:
        async for event in events:
            number = event.sequence_number
            yield event
    except RefusedRequest as error:
        yield ResponseErrorEvent(
            type="error",
            code=error.code,
            message=error.message,
            param=None,
            sequence_number=number + 1,
        )


def kept_responses(store: ResponseStore) -> APIRouter:
    """The routes of responses that were answered before."""
    router = APIRouter(tags=["responses"])

    @router.get("/v1/responses/{response_id}")
    async def read_response(response_id: str) -> Response:
        """A response that is still kept."""
        try:
            found = store.read(session_id.get(), response_id)
        except RefusedError as error:
            raise RefusedRequest(error.refusal) from error
        return Response(found, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        """Delete a response that is still kept."""
        try:
            store.delete(session_id.get(), response_id)
        except RefusedError as error:
            raise RefusedRequest(error.refusal) from error
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router
