"""`/v1/responses`: vLLM's class, over a bounded store of conversations.

vLLM's own store is never freed, and vLLM leaves the tool calls of earlier answers out of a
continued conversation. So this module replaces `previous_response_id` by the whole earlier
conversation, a chain of responses. Each is stored as JSON, with its own input and the id of the
previous one. Only the session that created a response can read it.

Invariant: at most ``max_responses`` responses are stored, and together they have at most
``max_bytes`` of JSON. The least recently used response is dropped first. Continuing a conversation
counts as a use of all its responses, from the last to the first.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from openai.types.responses import ResponseErrorEvent
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.utils import random_uuid

from torchtitan_rl.backends.vllm.openai_chat import AnswerStream, RefusalErrors
from torchtitan_rl.backends.vllm.openai_constraints import call_mark, readable_calls
from torchtitan_rl.backends.vllm.openai_core import RefusedRequest, session_of_request
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.middleware import current_run, session_id

_UNSERVED = ("background", "conversation")


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
        # The body is parsed again, because validation has replaced items of the parsed body.
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
            history = self.store.conversation(session, previous)
        whole = [_with_one_text(item) for item in (*history, *items)]
        given = {name: value for name, value in body.items() if value is not None}
        # A field that is null was left out, because vLLM fails at some null values.
        if whole != items or len(given) < len(body):
            given.pop("previous_response_id", None)
            request = ResponsesRequest.model_validate({**given, "input": whole})
        # A client could choose another response's id.
        request.request_id = f"resp_{current_run.get().request_id or random_uuid()}"
        request.turn = session, items, previous, bool(request.store)  # for the whole answer
        request.store = False  # vLLM itself stores nothing
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
        """Build the whole answer. vLLM calls this also at the end of a stream."""
        answer = await super().responses_full_generator(
            request, sampling_params, outputs, context, *args, **options
        )
        if isinstance(answer, ResponsesResponse):
            session, items, previous, is_stored = request.turn
            answer.previous_response_id = previous
            calls = [item for item in answer.output if item.type == "function_call"]
            self.engine_client.constraints.note_answer(
                request,
                arguments=[call.arguments for call in calls],
                text=context.final_output.outputs[0].text,
                mark=call_mark(self.parser),
            )
            if is_stored:
                response = answer.model_dump(mode="json", by_alias=True)
                self.store.keep(session, response, items, previous)
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
    """Join the parts of an assistant's message. vLLM reads only the first, and fails if there is
    none."""
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
            code=error.refusal.code,
            message=error.message,
            param=None,
            sequence_number=number + 1,
        )


def kept_responses(store: ResponseStore) -> APIRouter:
    router = APIRouter(tags=["responses"])

    @router.get("/v1/responses/{response_id}")
    async def read_response(response_id: str) -> Response:
        """A response that is still kept."""
        found = store.read(session_id.get(), response_id)
        return Response(found, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        """Delete a response that is still kept."""
        store.delete(session_id.get(), response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


Owner = str | None  # a session id
_Key = tuple[Owner, str]

_OVERHEAD = 1024  # estimated bytes of an entry in addition to its JSON
_MAX_DROPPED = 100_000  # ids of dropped responses that are remembered, for a clear error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    response: bytes
    items: bytes
    previous: str | None

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + _OVERHEAD


class ResponseStore:
    def __init__(self, *, max_responses: int = 10_000, max_bytes: int = 64 << 20) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[_Key, _Stored] = OrderedDict()  # least recently used first
        self._dropped: OrderedDict[_Key, None] = OrderedDict()
        self.num_bytes = 0

    def keep(
        self, owner: Owner, response: Mapping[str, Any], items: Sequence[Any], previous: str | None
    ) -> None:
        stored = _Stored(
            response=json.dumps(response).encode(),
            items=json.dumps(items).encode(),
            previous=previous,
        )
        self._stored[owner, response["id"]] = stored
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self._max_bytes or len(self._stored) > self._max_responses:
            key, dropped = self._stored.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self._dropped[key] = None
            if len(self._dropped) > _MAX_DROPPED:
                self._dropped.popitem(last=False)

    def conversation(self, owner: Owner, response_id: str) -> list[Any]:
        """Return the items of all inputs and outputs up to a response, oldest first. Raises
        RefusedError: 404 or 410, the response or an earlier one is not stored."""
        turns: list[_Stored] = []
        following: str | None = response_id
        while following is not None:
            turns.append(self._find(owner, following))
            following = turns[-1].previous
        return [
            item
            for turn in reversed(turns)
            for item in (*json.loads(turn.items), *json.loads(turn.response)["output"])
        ]

    def read(self, owner: Owner, response_id: str) -> bytes:
        """Return a response as JSON; raises as `conversation`."""
        return self._find(owner, response_id).response

    def delete(self, owner: Owner, response_id: str) -> None:
        """Delete a response; raises as `conversation`."""
        self.num_bytes -= self._find(owner, response_id).num_bytes
        del self._stored[owner, response_id]

    def _find(self, owner: Owner, response_id: str) -> _Stored:
        key = (owner, response_id)
        if key in self._stored:
            self._stored.move_to_end(key)
            return self._stored[key]
        if key in self._dropped:
            message = (
                f"response {response_id!r} is no longer kept, because many came after it: "
                "send the whole conversation as input"
            )
            raise RefusedError(410, "response_dropped", message)
        message = f"there is no response {response_id!r} in this session"
        raise RefusedError(404, "response_not_found", message)
