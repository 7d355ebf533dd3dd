"""An endpoint in the same process as its controller, and what its clients may ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.backends.specs import EndpointSpec
from torchtitan_rl.channel import End
from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.link import (
    ControllerLink,
    RequestEnd,
    SystemStatus,
    ToController,
    ToEndpoint,
)
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnProgress,
    Progress,
    SamplingParams,
    VersionRun,
)

HEALTHY = SystemStatus(is_healthy=True)


def now() -> float:
    return asyncio.get_running_loop().time()


def request(request_id: str, *, max_tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def completion(request_id: str, num_tokens: int = 4) -> Completion:
    return Completion(
        request_id=request_id,
        token_ids=tuple(range(num_tokens)),
        logprobs=tuple(-0.1 * (index + 1) for index in range(num_tokens)),
        version_runs=(VersionRun(0, 0),),
        finish_reason=FinishReason.LENGTH,
    )


@dataclass
class Generator:
    """Samples token i as i, one every ``step_s``."""

    step_s: float = 0.1
    fails: Callable[[str], Exception | None] = lambda request_id: None
    running: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    async def complete(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        request_id, num_tokens = request.request_id, request.sampling.max_tokens
        whole = completion(f"inner {request_id}", num_tokens)
        self.asked.append(request_id)
        self.running.add(request_id)
        try:
            for index in range(num_tokens):
                await asyncio.sleep(self.step_s)
                if on_progress is not None:
                    on_progress(
                        Progress(
                            request_id=whole.request_id,
                            start=index,
                            token_ids=whole.token_ids[index : index + 1],
                            logprobs=whole.logprobs[index : index + 1],
                            version_runs=whole.version_runs,
                        )
                    )
            if (error := self.fails(request_id)) is not None:
                raise error
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        finally:
            self.running.discard(request_id)
        return whole


class LinkedEndpoint:
    """An endpoint whose process is this one, until it is lost; it cannot be started again.
    ``latency_s``: of what is sent to it."""

    name = "endpoint"

    def __init__(self, link: ControllerLink, *, latency_s: float = 0.0) -> None:
        self.link = link
        self.base_url = "http://127.0.0.1:1/v1"
        self.sent: list[tuple[float, tuple[ToEndpoint, ...]]] = []
        self.lost = asyncio.Event()
        self.drains: list[float] = []
        self._latency_s = latency_s

    def lose(self) -> None:
        self.lost.set()

    def send(self, messages: tuple[ToEndpoint, ...]) -> None:
        if self.lost.is_set():
            return
        self.sent.append((now(), messages))
        asyncio.get_running_loop().call_later(self._latency_s, self.link.deliver, messages)

    async def receive(self) -> tuple[ToController, ...]:
        works = asyncio.ensure_future(self.link.take()), asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return works[0].result()
        finally:
            for work in works:
                work.cancel()

    async def restart(self) -> None:
        raise EndpointLostError("no process can be started")

    async def start(self) -> None:
        return

    async def drain(self, grace_s: float) -> None:
        self._check()
        self.drains.append(grace_s)

    async def close(self) -> None:
        return

    def _check(self) -> None:
        if self.lost.is_set():
            raise EndpointLostError("the endpoint's process is lost")


async def ends_of(link: ControllerLink, number: int) -> dict[str, RequestEnd]:
    """The next so many ends, by id; each id once."""
    ends: dict[str, RequestEnd] = {}
    while len(ends) < number:
        for end in await link.next_outputs():
            if not isinstance(end, End):
                continue
            request_id = str(end.call_id)
            assert request_id not in ends
            ends[request_id] = end
    return ends


def endpoint_spec(model: Path, *, max_model_len: int, **endpoint: Any) -> EndpointSpec:
    """An endpoint on the CPU with these options and without keys, for the model in a folder."""
    return EndpointSpec(
        model=model,
        device="cpu",
        dtype="bfloat16",
        max_model_len=max_model_len,
        generation_config="auto",
        endpoint=EndpointConfig(**endpoint),
        keys=Keys(),
        log_dir=model,
    )
