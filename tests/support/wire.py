"""A replica whose connection is a test: it carries what the test puts on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.replicas import request
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.channel import Call, CallId, End
from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.types import Completion, FinishReason, Progress, VersionRun
from torchtitan_rl.weights.handle import WeightHandle


def done(name: str, count: int = 1) -> End:
    completion = Completion(
        request_id=name,
        token_ids=(7,) * count,
        logprobs=(-1.0,) * count,
        version_runs=(VersionRun(0, 0),),
        finish_reason=FinishReason.LENGTH,
    )
    return End(call_id=name, result=completion)


def progress(name: str) -> Progress:
    return Progress(
        request_id=name,
        start=0,
        token_ids=(7,),
        logprobs=(-1.0,),
        version_runs=(VersionRun(0, 0),),
    )


class Wire:
    """Keeps the batches that it is given, and carries the news that a test puts on it."""

    name = "far"

    def __init__(self) -> None:
        self.batches: list[tuple[ToReplica, ...]] = []
        self.news: asyncio.Queue[tuple[FromReplica, ...] | BaseException] = asyncio.Queue()
        self.is_cut = False
        self.replica = ConnectedReplica(self)

    def send(self, messages: tuple[ToReplica, ...]) -> None:
        if self.is_cut:
            raise ReplicaError("the wire was cut")
        self.batches.append(messages)

    async def receive(self) -> tuple[FromReplica, ...]:
        news = await self.news.get()
        if isinstance(news, BaseException):
            raise news
        return news

    async def stage(self, handle: WeightHandle) -> None: ...

    async def close_loop(self, *, is_lost: bool) -> None: ...

    async def close(self) -> None: ...

    def tell(self, *news: FromReplica) -> None:
        self.news.put_nowait(news)

    def call(self, name: str, **options: Any) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.replica.generate(request(name), **options))

    def sent(self) -> list[list[CallId]]:
        return [[one.call_id for one in batch if isinstance(one, Call)] for batch in self.batches]


def virtually(scenario: Callable[[Wire], Awaitable[None]]) -> None:
    async def run() -> None:
        wire = Wire()
        await scenario(wire)
        await wire.replica.close()
        assert {task for task in asyncio.all_tasks() if not task.done()} == {asyncio.current_task()}

    run_virtually(run())
