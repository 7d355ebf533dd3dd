"""A front end that plays vLLM's, and a replica whose tokens name the run that sampled them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from tests.support.replicas import GatedReplica
from torchtitan_rl.channel import End
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import FAILED, ControllerLink, RequestEnd
from torchtitan_rl.serving.middleware import close_at_end, session_id
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnProgress,
    Progress,
    SamplingParams,
    VersionRun,
)

MAX_TOKENS = 6


class TokenReplica(GatedReplica):
    """Samples a token each 0.1 s, and tells what it sampled for sessions, and for which prompts.
    The tokens of a run are its number, counted from 1."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sampled_in: dict[str, int] = {}
        self.prompts: list[tuple[int, ...]] = []  # of the runs

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        known = len(request.resume_from.token_ids) if request.resume_from else 0
        number = 0
        self.prompts.append(request.prompt_token_ids)
        run = len(self.prompts)
        self.running += 1
        try:
            while number < request.sampling.max_tokens and request.request_id not in self.aborted:
                await asyncio.sleep(0.1)
                number += 1
                session = request.session_id or ""
                self.sampled_in[session] = self.sampled_in.get(session, 0) + 1
                if on_progress is not None:
                    on_progress(_tokens(request, run, known + number - 1, 1, Progress))
        finally:
            self.running -= 1
        is_cut = number < request.sampling.max_tokens
        reason = FinishReason.ABORT if is_cut else FinishReason.LENGTH
        return _tokens(
            request, run, None, number, Completion, finish_reason=reason, replica=self.name
        )


def _tokens(request: Any, run: int, start: int | None, number: int, made: Any, **more: Any) -> Any:
    position = {} if start is None else {"start": start}
    return made(
        request_id=request.request_id,
        token_ids=(run,) * number,
        logprobs=(-1.0,) * number,
        version_runs=(VersionRun(0, 0),) if number else (),
        **position,
        **more,
    )


@dataclass
class FrontEnd:
    """Plays vLLM: routes over a link, whose outputs one task takes."""

    link: ControllerLink
    waiting: dict[str, asyncio.Queue[Any]] = field(default_factory=dict)
    num_asked: int = 0
    is_dead: bool = False

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            streams = bool(body.get("stream"))
            name = request.headers.get("x-request-id", uuid.uuid4().hex)
            prompt = tuple(body.get("prompt", (1, body.get("seed", 0))))
            pieces = self.pieces(f"chatcmpl-{name}", streams, prompt)
            close_at_end(pieces.aclose)
            if streams:
                first = await anext(pieces)
                if isinstance(first, End) and first.error is not None:
                    return _answer(name, first)
                return StreamingResponse(_chunks(first, pieces))
            answering = asyncio.ensure_future(anext(pieces))
            gone = asyncio.ensure_future(_gone(request))
            try:
                await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
                return _answer(name, answering.result()) if answering.done() else Response()
            finally:
                for task in (answering, gone):
                    task.cancel()
                await asyncio.wait({answering, gone})

        return app

    async def pieces(self, name: str, streams: bool, prompt: tuple[int, ...]) -> AsyncIterator[Any]:
        self.num_asked += 1
        if self.is_dead:
            yield End(call_id="", error=RefusedError(*FAILED))
            return
        request_id = f"{name}-{uuid.uuid4().hex[:8]}"
        events = self.waiting[request_id] = asyncio.Queue()
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            session_id=session_id.get(),
        )
        self.link.submit(request, streams=streams)
        try:
            while True:
                event = await events.get()
                yield event
                if isinstance(event, End):
                    return
        finally:
            self.link.abort([request_id])
            del self.waiting[request_id]

    async def take_outputs(self) -> None:
        while True:
            for one in await self.link.next_outputs():
                name = one.call_id if isinstance(one, End) else one.request_id
                self.pass_on(str(name), one)

    def pass_on(self, request_id: str, event: Progress | RequestEnd) -> None:
        if request_id in self.waiting:
            self.waiting[request_id].put_nowait(event)

    def outputs_ended(self, task: asyncio.Task[None]) -> None:
        self.is_dead = True
        for request_id, events in self.waiting.items():
            events.put_nowait(End(call_id=request_id, error=RefusedError(*FAILED)))
        self.link.fail("outputs are no longer taken")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _chunks(first: Any, pieces: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    yield b"first"
    if not isinstance(first, End):
        async for _ in pieces:
            yield b"piece"


def _answer(name: str, end: RequestEnd) -> Response:
    if end.error is not None:
        error = {"message": end.error.message, "type": "x", "param": None, "code": "x"}
        return Response(json.dumps({"error": error}), status_code=end.error.status)
    assert end.result is not None
    assert end.call_id == end.result.request_id
    answer = {"id": f"chatcmpl-{name}", "token_ids": list(end.result.token_ids)}
    return Response(json.dumps(answer))
