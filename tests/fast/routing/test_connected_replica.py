"""A replica over a connection: batches, losses, aborts, answers and calls that are given up."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fast.generation.test_loop import running_loop
from tests.support.loop_replica import LoopPeer
from tests.support.replicas import request, settle
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import (
    GenerationError,
    InvalidRequestError,
    LoopClosedError,
    LoopFailedError,
    ReplicaError,
)
from torchtitan_rl.generation.commands import Pause, ReadTokens
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.generation.scripted import ScriptedEngine
from torchtitan_rl.generation.server import EngineServer, FromReplica, Submission, ToReplica
from torchtitan_rl.routing.connected_replica import ConnectedReplica
from torchtitan_rl.rpc.messages import Abort, Call, CallId, End
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    FinishReason,
    GenerationRequest,
    Progress,
    VersionRun,
)
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


def called(item: GenerationRequest) -> ToReplica:
    return Call(call_id=item.request_id, payload=Submission(request=item))


class Wire:
    """Carries batches in ``latency_s``, and the news that a test puts on it."""

    name = "far"

    def __init__(self, latency_s: float = 1.0) -> None:
        self.latency_s = latency_s
        self.batches: list[tuple[ToReplica, ...]] = []
        self.news: asyncio.Queue[tuple[FromReplica, ...] | BaseException] = asyncio.Queue()
        self.is_cut = False
        self.replica = ConnectedReplica(self)

    async def deliver(self, messages: tuple[ToReplica, ...]) -> None:
        self.batches.append(messages)
        await asyncio.sleep(self.latency_s)
        if self.is_cut:
            raise ReplicaError("the wire was cut")

    async def poll(self) -> tuple[FromReplica, ...]:
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


def test_the_first_leaves_at_once_and_what_comes_meanwhile_leaves_together() -> None:
    async def scenario(wire: Wire) -> None:
        calls = [wire.call("a")]
        await settle()
        calls += [wire.call(name) for name in "bcd"]
        await settle()
        assert wire.sent() == [["a"]]
        await asyncio.sleep(1.5)
        assert wire.sent() == [["a"], ["b", "c", "d"]]
        wire.tell(*(done(name) for name in "dcba"))
        completions = await asyncio.gather(*calls)
        assert [one.request_id for one in completions] == list("abcd")
        await asyncio.sleep(5)
        assert len(wire.batches) == 2

    virtually(scenario)


def test_an_error_of_one_request_fails_that_one_alone() -> None:
    async def scenario(wire: Wire) -> None:
        bad, good = wire.call("bad"), wire.call("good")
        await settle()
        error = InvalidRequestError("prompt too long")
        wire.tell(End(call_id="bad", error=error))
        with pytest.raises(InvalidRequestError, match="prompt too long"):
            await bad
        wire.tell(done("good"))
        assert (await good).request_id == "good"

    virtually(scenario)


@pytest.mark.parametrize("where", ["submission", "news", "no error of ours", "cancelled"])
def test_trap_2_a_lost_replica_fails_everything_outstanding_and_everything_later(
    where: str,
) -> None:
    async def scenario(wire: Wire) -> None:
        calls = [wire.call(name) for name in "abc"]
        await settle()
        late = wire.call("late")  # not sent yet
        abort = asyncio.create_task(wire.replica.abort(("a",)))
        await settle()
        if where == "submission":
            wire.is_cut = True
        else:
            errors = {
                "news": ReplicaError("it died"),
                "no error of ours": OSError("broken pipe"),
                "cancelled": asyncio.CancelledError(),
            }
            wire.news.put_nowait(errors[where])
        await asyncio.sleep(2)
        for call in [*calls, late]:
            with pytest.raises(ReplicaError, match=r"cut|died|broken pipe|cancelled from within"):
                await call
        with pytest.raises(ReplicaError):
            await abort
        for _ in range(2):
            with pytest.raises(ReplicaError):
                await wire.replica.generate(request("later"))
            with pytest.raises(ReplicaError):
                await wire.replica.abort(("a",))

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
        payloads = [one.payload for one in batch if isinstance(one, Call)]
        assert payloads == [
            Submission(request=request("s"), hears=True, streams=True),
            Submission(request=request("q")),
        ]
        wire.tell(progress("s"), progress("q"), done("s"), done("q"))
        await asyncio.gather(streaming, silent)
        wire.tell(progress("s"))
        await settle()
        assert heard == ["s"]

    virtually(scenario)


def test_an_abort_returns_when_the_replica_knows() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await asyncio.sleep(2)
        abort = asyncio.create_task(wire.replica.abort(("a", "unknown")))
        await settle()
        assert not abort.done()
        await abort
        assert wire.batches[-1] == (Abort(call_id="a"),)
        wire.tell(done("a"))
        await call
        await wire.replica.abort(("a",))  # ended: ignored
        assert len(wire.batches) == 2

    virtually(scenario)


def test_a_call_that_was_given_up_before_it_left_never_leaves() -> None:
    async def scenario(wire: Wire) -> None:
        first = wire.call("first")
        await settle()
        given_up = wire.call("a")
        await settle()
        given_up.cancel()
        await asyncio.wait({given_up})
        again = wire.call("a")
        await asyncio.sleep(2)
        assert wire.sent() == [["first"], ["a"]]
        wire.tell(done("first"), done("a"))
        await asyncio.gather(first, again)

    virtually(scenario)


def test_the_id_of_a_call_that_was_given_up_is_taken_again_when_the_replica_has_ended_it() -> None:
    async def scenario(wire: Wire) -> None:
        heard: list[Progress] = []
        given_up = wire.call("a", on_progress=heard.append)
        await asyncio.sleep(2)
        given_up.cancel()
        await asyncio.wait({given_up})
        again = wire.call("a")
        await asyncio.sleep(2)
        assert wire.sent() == [["a"]]
        wire.tell(progress("a"), done("a", count=5))
        await settle()
        assert not again.done()  # that was the end of the first
        assert heard == []
        assert wire.sent() == [["a"], ["a"]]
        wire.tell(done("a", count=9))
        assert len((await again).token_ids) == 9

    virtually(scenario)


def test_an_abort_that_has_not_left_does_not_meet_a_later_request_of_that_id() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await asyncio.sleep(2)
        blocker = wire.call("blocker")
        await settle()
        abort = asyncio.create_task(wire.replica.abort(("a",)))
        await settle()
        wire.tell(done("a"))
        await call
        again = wire.call("a")
        await abort
        assert not any(isinstance(one, Abort) for one in wire.batches[-1])
        wire.tell(done("a"), done("blocker"))
        await asyncio.gather(again, blocker)

    virtually(scenario)


@pytest.mark.parametrize("end", ["closed", "lost", "by an end"])
def test_a_loss_that_only_reaches_calls_whose_callers_are_gone_is_not_printed(end: str) -> None:
    complaints: list[dict[str, Any]] = []

    async def scenario(wire: Wire) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said))
        call, reading = wire.call("a"), asyncio.create_task(wire.replica.execute(ReadTokens()))
        await asyncio.sleep(2)
        for task in (call, reading):
            task.cancel()
        await asyncio.wait({call, reading})
        if end == "closed":
            await wire.replica.close()
        elif end == "lost":
            wire.news.put_nowait(ReplicaError("it died"))
        else:
            error = LoopClosedError("engine loop of far was closed")
            wire.tell(End(call_id="a", error=error))
        await settle()
        del call, reading, task
        gc.collect()

    virtually(scenario)
    gc.collect()
    assert complaints == []


def test_an_id_that_is_outstanding_is_refused() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await settle()
        with pytest.raises(InvalidRequestError, match="still outstanding"):
            await wire.replica.generate(request("a"))
        wire.tell(done("a"))
        await call

    virtually(scenario)


def test_closing_fails_what_is_outstanding() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await settle()
        await wire.replica.close()
        with pytest.raises(LoopClosedError):
            await call

    virtually(scenario)


class OverPickles(LoopPeer):
    """Its messages travel as bytes, as between processes."""

    latency_s = 0.0

    async def deliver(self, messages: tuple[ToReplica, ...]) -> None:
        await asyncio.sleep(self.latency_s)
        await super().deliver(pickle.loads(pickle.dumps(messages)))

    async def poll(self) -> tuple[FromReplica, ...]:
        messages = await super().poll()
        await asyncio.sleep(self.latency_s)
        return pickle.loads(pickle.dumps(messages))


def over_pickles(
    loop: EngineLoop, *, interval_s: float, latency_s: float = 0.0
) -> ConnectedReplica[OverPickles]:
    server = EngineServer(loop, interval_s=interval_s)
    peer = OverPickles("far", server, loop, None)
    peer.latency_s = latency_s
    return ConnectedReplica(peer)


@pytest.mark.parametrize("interval_s", [0.0, 0.005])
def test_a_loop_in_another_process_completes_streams_refuses_and_aborts(interval_s: float) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(step_delay_s=0.0002, max_model_len=10**6)
        with running_loop(engine, stream_interval_s=0.001, progress_interval_s=0.01) as loop:
            replica = over_pickles(loop, interval_s=interval_s, latency_s=0.001)
            heard: dict[str, list[int]] = {}

            async def run(index: int) -> Completion:
                name = f"r{index}"
                hear = heard.setdefault(name, [])
                return await replica.generate(
                    request(name, max_tokens=50),
                    lambda one: hear.extend(one.token_ids),
                    streams=index % 2 == 0,
                )

            with pytest.raises(InvalidRequestError):
                await replica.generate(request("long", max_tokens=10**7))
            cut = asyncio.create_task(replica.generate(request("cut", max_tokens=900_000)))
            completions = await asyncio.gather(*(run(index) for index in range(20)))
            await replica.abort(("cut",))
            assert (await cut).finish_reason is FinishReason.ABORT
            for one in completions:
                told = heard[one.request_id]
                assert one.finish_reason is FinishReason.LENGTH
                assert tuple(told) == one.token_ids[: len(told)]
            assert sum(len(told) for told in heard.values()) > 20
            await replica.close()

    asyncio.run(scenario())


def test_a_loop_that_fails_or_is_closed_ends_its_calls_over_the_connection() -> None:
    async def ends_with(loop: EngineLoop, error: type[ReplicaError]) -> None:
        replica = over_pickles(loop, interval_s=0.0)
        calls = [replica.generate(request(name, max_tokens=100)) for name in "abc"]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [error] * 3
        with pytest.raises(error):
            await replica.generate(request("later"))
        await replica.close()

    with running_loop(ScriptedEngine(fail_at_step=5)) as failing:
        asyncio.run(ends_with(failing, LoopFailedError))
    with running_loop(ScriptedEngine()) as closed:
        closed.close()
        asyncio.run(ends_with(closed, LoopClosedError))


def test_news_comes_at_once_and_while_requests_run_once_per_interval() -> None:
    async def scenario() -> None:
        with running_loop(ScriptedEngine()) as loop:
            server = EngineServer(loop, interval_s=1.0, idle_s=30.0)
            clock = asyncio.get_running_loop()
            assert await server.poll() == ()
            assert clock.time() == 30.0
            refused = called(request("x", prompt_len=600))

            async def refusals() -> list[float]:
                times = []
                for pause_s in (5.0, 0.0, 0.3, 0.0):
                    await asyncio.sleep(pause_s)
                    server.deliver([refused])
                    (end,) = await server.poll()
                    assert isinstance(end, End)
                    assert isinstance(end.error, InvalidRequestError)
                    times.append(clock.time())
                return times

            assert await refusals() == pytest.approx([35.0, 35.0, 35.3, 35.3])
            loop.execute(Pause("keep")).result(60)
            server.deliver([called(request("frozen"))])
            assert await refusals() == pytest.approx([40.3, 41.3, 42.3, 43.3])

    run_virtually(scenario())


def test_the_end_of_the_last_request_waits_for_no_interval() -> None:
    async def scenario() -> None:
        with running_loop(ScriptedEngine()) as loop:
            server = EngineServer(loop, interval_s=1e6, idle_s=1e6)
            for index in range(5):
                server.deliver([called(request(f"r{index}"))])
                async with asyncio.timeout(60):
                    (end,) = await server.poll()
                assert isinstance(end, End)
                assert end.result is not None

    asyncio.run(scenario())


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


def test_a_command_that_fails_fails_its_caller_alone() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        pausing = asyncio.create_task(wire.replica.execute(Pause("wait")))
        await settle()
        (command,) = (one for one in wire.batches[0] if one.call_id != "a")
        wire.tell(End(call_id=command.call_id, error=GenerationError("resumed")))
        with pytest.raises(GenerationError, match="resumed"):
            await pausing
        wire.tell(done("a"))
        await call

    virtually(scenario)
