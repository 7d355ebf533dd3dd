"""Answers that take longer than their client waits: what the official clients send is joined to the
request that runs. vLLM's layers and the real HTTP server, with a generator that answers on demand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.real.local_endpoint import local_endpoint
from tests.support.async_tests import on_event_loop
from tests.support.endpoints import endpoint_spec
from torchtitan_rl.backends.vllm.openai import build_application
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.link import ControllerLink
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnProgress,
    Progress,
    VersionRun,
)

TIMEOUT_S = 1.0
PATIENT = {"timeout": TIMEOUT_S, "max_retries": 100}
HASTY = PATIENT | {"timeout": TIMEOUT_S / 2}
USER = {"role": "user", "content": "hi"}


@dataclass
class Slow:
    """Each sample is another text, and comes once ``ready`` is set: a letter at a time, every
    ``letter_s``, up to the letter at which it stalls."""

    tokenizer: Any
    url: str = ""
    app: EndpointApp | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    letter_s: float = 0.0
    stalls_at: int | None = None
    sampled: list[str] = field(default_factory=list)
    num_cancelled: int = 0

    async def complete(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        text = f"answer {len(self.sampled)}"
        self.sampled.append(text)
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        try:
            await self.ready.wait()
            for place, token in enumerate(token_ids):
                if place == self.stalls_at:
                    await asyncio.Event().wait()
                await asyncio.sleep(self.letter_s)
                if on_progress is not None:
                    on_progress(
                        Progress(
                            request_id=request.request_id,
                            start=place,
                            token_ids=(token,),
                            logprobs=(-1.0,),
                            version_runs=(VersionRun(0, 0),),
                        )
                    )
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        token_ids += (self.tokenizer.eos_token_id,)
        return Completion(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=(-1.0,) * len(token_ids),
            version_runs=(VersionRun(0, 0),),
            finish_reason=FinishReason.STOP,
        )

    @property
    def num_replayed(self) -> float:
        assert self.app is not None
        return self.app.counts()["http_requests_replayed_total"]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(checkpoint: Path) -> AsyncIterator[Slow]:
    from transformers import AutoTokenizer

    slow = Slow(AutoTokenizer.from_pretrained(checkpoint))
    spec = endpoint_spec(checkpoint, max_model_len=1024, stream_interval_s=0.0)

    def application(link: ControllerLink) -> EndpointApp:
        application = build_application(spec, link)
        slow.app = EndpointApp(application, spec.endpoint, keys=spec.keys, commands=link)
        return slow.app

    async with local_endpoint(application, slow.complete, handlers={}) as url:
        slow.url = url
        yield slow


async def chat(slow: Slow, key: str, *, stream: bool = False, **options: Any) -> str:
    async with openai.AsyncOpenAI(base_url=f"{slow.url}/v1", api_key=key, **options) as client:
        asked: Any = {"model": "policy", "messages": [USER], "stream": stream}
        answer: Any = await client.chat.completions.create(**asked)
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])


async def responses(slow: Slow, key: str, *, stream: bool = False, **options: Any) -> str:
    async with openai.AsyncOpenAI(base_url=f"{slow.url}/v1", api_key=key, **options) as client:
        asked: Any = {"model": "policy", "input": "hi", "stream": stream}
        answer: Any = await client.responses.create(**asked)
        if not stream:
            return str(answer.output_text)
        deltas = [event async for event in answer if event.type == "response.output_text.delta"]
        return "".join(event.delta for event in deltas)


async def messages(slow: Slow, key: str, *, stream: bool = False, **options: Any) -> str:
    async with anthropic.AsyncAnthropic(base_url=slow.url, api_key=key, **options) as client:
        asked: Any = {"model": "policy", "messages": [USER], "max_tokens": 64, "stream": stream}
        answer: Any = await client.messages.create(**asked)
        if not stream:
            return str(answer.content[0].text)
        deltas = [event async for event in answer if event.type == "content_block_delta"]
        return "".join(event.delta.text for event in deltas)


APIS = {"chat": chat, "responses": responses, "messages": messages}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
@on_event_loop
async def test_an_answer_that_begins_after_the_clients_timeout_is_joined_by_its_retry(
    checkpoint: Path, api: str, stream: bool
) -> None:
    async with serving(checkpoint) as slow:
        asked = asyncio.create_task(APIS[api](slow, "any:s", stream=stream, **HASTY))
        await slow.until(lambda: slow.num_replayed >= 2)
        slow.ready.set()
        assert await asked == "answer 0"
        assert slow.sampled == ["answer 0"]


@pytest.mark.parametrize("api", APIS)
@on_event_loop
async def test_equal_requests_of_siblings_and_of_one_session_keep_answers_of_their_own(
    checkpoint: Path, api: str
) -> None:
    keys = [f"any:{session}" for session in "abcdefgh"] + ["any:one"] * 8
    async with serving(checkpoint) as slow:
        asked = [asyncio.create_task(APIS[api](slow, key, **HASTY)) for key in keys]
        await slow.until(lambda: slow.num_replayed >= 2 * len(keys))
        slow.ready.set()
        answers = await asyncio.gather(*asked)
        assert sorted(answers) == sorted(slow.sampled)
        assert len(set(answers)) == len(keys)


@pytest.mark.parametrize("api", APIS)
@on_event_loop
async def test_a_stream_may_take_longer_than_the_timeout_while_pieces_arrive(
    checkpoint: Path, api: str
) -> None:
    async with serving(checkpoint) as slow:
        slow.ready.set()
        slow.letter_s = TIMEOUT_S / 4
        assert await APIS[api](slow, "any:s", stream=True, **PATIENT) == "answer 0"
        assert slow.num_replayed == 0


@pytest.mark.parametrize("api", APIS)
@on_event_loop
async def test_a_stream_that_falls_silent_for_the_timeout_is_not_retried_and_ends(
    checkpoint: Path, api: str
) -> None:
    async with serving(checkpoint) as slow:
        slow.ready.set()
        slow.stalls_at = 4
        with pytest.raises((openai.APITimeoutError, httpx2.ReadTimeout)):
            await APIS[api](slow, "any:s", stream=True, **PATIENT)
        await slow.until(lambda: slow.num_cancelled == 1)
        assert slow.sampled == ["answer 0"]
