"""A replica over a connection: batches, losses, progress and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.replicas import request, settle
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.channel import Call, CallId, End
from torchtitan_rl.errors import InvalidRequestError, ReplicaError
from torchtitan_rl.generation.commands import AbortRequests, ReadTokens
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.types import Completion, EngineReading, FinishReason, Progress, VersionRun
from torchtitan_rl.weights.distribution import WeightHandle


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


def test_a_cancelled_call_reports_nothing_more_and_keeps_its_id_until_it_has_ended() -> None:
    async def scenario(wire: Wire) -> None:
        heard: list[Progress] = []
        call = wire.call("a", on_progress=heard.append)
        await settle()
        call.cancel()
        await settle()
        wire.tell(progress("a"))
        with pytest.raises(InvalidRequestError, match="still outstanding on far"):
            await wire.replica.generate(request("a"))
        wire.tell(done("a"))
        await settle()
        again = wire.call("a", on_progress=heard.append)
        wire.tell(progress("a"), done("a"))
        assert (await again).request_id == "a"
        assert len(heard) == 1

    virtually(scenario)


@pytest.mark.parametrize("where", ["submission", "news", "no error of ours", "cancelled"])
def test_trap_2_a_lost_replica_fails_everything_outstanding_and_everything_later(
    where: str,
) -> None:
    async def scenario(wire: Wire) -> None:
        calls = [wire.call(name) for name in "abc"]
        await settle()
        abort = asyncio.create_task(wire.replica.execute(AbortRequests(("a",))))
        await settle()
        wire.is_cut = where == "submission"
        late = wire.call("late")
        if where != "submission":
            errors = {
                "news": ReplicaError("it died"),
                "no error of ours": OSError("broken pipe"),
                "cancelled": asyncio.CancelledError(),
            }
            wire.news.put_nowait(errors[where])
        await asyncio.sleep(2)
        for call in [*calls, late]:
            with pytest.raises(ReplicaError, match=r"cut|died|broken pipe|Cancelled"):
                await call
        with pytest.raises(ReplicaError):
            await abort
        for _ in range(2):
            with pytest.raises(ReplicaError):
                await wire.replica.generate(request("later"))
            with pytest.raises(ReplicaError):
                await wire.replica.execute(AbortRequests(("a",)))

    virtually(scenario)


def test_progress_is_heard_before_the_end_and_by_those_who_asked() -> None:
    async def scenario(wire: Wire) -> None:
        heard: list[str] = []
        ended: list[str] = []

        def hear(one: Progress) -> None:
            assert one.request_id not in ended
            heard.append(one.request_id)

        streaming, silent = wire.call("s", on_progress=hear, streams=True), wire.call("q")
        streaming.add_done_callback(lambda _: ended.append("s"))
        await settle()
        (batch,) = wire.batches
        assert batch == (
            Call(call_id="s", payload=request("s"), streams=True),
            Call(call_id="q", payload=request("q")),
        )
        wire.tell(progress("s"), progress("q"), done("s"), done("q"))
        await asyncio.gather(streaming, silent)
        wire.tell(progress("s"))
        await settle()
        assert heard == ["s"]

    virtually(scenario)


def test_an_answer_comes_after_earlier_progress_and_ends_and_before_later_ones() -> None:
    async def scenario(wire: Wire) -> None:
        order: list[str] = []

        async def complete(name: str) -> None:
            await wire.replica.generate(
                request(name), lambda one: order.append(f"progress of {one.request_id}")
            )
            order.append(name)

        calls = [asyncio.create_task(complete(name)) for name in "ab"]
        answering = asyncio.create_task(
            wire.replica.execute(ReadTokens(), lambda answer: order.append("answer"))
        )
        await settle()
        (command,) = (one for one in wire.batches[0] if one.call_id not in ("a", "b"))
        reading = EngineReading(sampled_tokens=3, running_tokens=1)
        answer = End(call_id=command.call_id, result=reading)
        wire.tell(done("a"), progress("b"), answer, done("b"))
        assert await answering is reading
        await asyncio.gather(*calls)
        assert order == ["progress of b", "a", "answer", "b"]

    virtually(scenario)
