"""Many calls in few messages: batches, news, losses, aborts and calls that are given up."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fast.generation.test_loop import running_loop
from tests.support.replicas import request, settle
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import (
    InvalidRequestError,
    LoopClosedError,
    LoopFailedError,
    ReplicaError,
)
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.generation.mailbox import Batch, End, Mailbox, News, Submission
from torchtitan_rl.generation.scripted import ScriptedEngine
from torchtitan_rl.routing.exchange import Exchange
from torchtitan_rl.types import Completion, FinishReason, Progress, VersionRun


def done(name: str, count: int = 1) -> End:
    completion = Completion(
        request_id=name,
        token_ids=(7,) * count,
        logprobs=(-1.0,) * count,
        version_runs=(VersionRun(0, 0),),
        finish_reason=FinishReason.LENGTH,
    )
    return End(request_id=name, completion=completion)


def progress(name: str) -> Progress:
    return Progress(
        request_id=name,
        start=0,
        token_ids=(7,),
        logprobs=(-1.0,),
        version_runs=(VersionRun(0, 0),),
    )


class Wire:
    """Carries batches in ``latency_s``, and the news that a test puts on it."""

    def __init__(self, latency_s: float = 1.0) -> None:
        self.latency_s = latency_s
        self.batches: list[Batch] = []
        self.news: asyncio.Queue[News | Exception] = asyncio.Queue()
        self.is_cut = False
        self.exchange = Exchange("far", submit=self.submit, collect=self.collect)

    async def submit(self, batch: Batch) -> None:
        self.batches.append(batch)
        await asyncio.sleep(self.latency_s)
        if self.is_cut:
            raise ReplicaError("the wire was cut")

    async def collect(self) -> News:
        news = await self.news.get()
        if isinstance(news, Exception):
            raise news
        return news

    def call(self, name: str, **options: Any) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.exchange.generate(request(name), **options))

    def sent(self) -> list[list[str]]:
        return [[one.request.request_id for one in batch.requests] for batch in self.batches]


def virtually(scenario: Callable[[Wire], Awaitable[None]]) -> None:
    async def run() -> None:
        wire = Wire()
        await scenario(wire)
        await wire.exchange.close()
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
        wire.news.put_nowait(News(ends=tuple(done(name) for name in "dcba")))
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
        wire.news.put_nowait(News(ends=(End(request_id="bad", error=error),)))
        with pytest.raises(InvalidRequestError, match="prompt too long"):
            await bad
        wire.news.put_nowait(News(ends=(done("good"),)))
        assert (await good).request_id == "good"

    virtually(scenario)


@pytest.mark.parametrize("where", ["submission", "news", "no error of ours"])
def test_trap_2_a_lost_replica_fails_everything_outstanding_and_everything_later(
    where: str,
) -> None:
    async def scenario(wire: Wire) -> None:
        calls = [wire.call(name) for name in "abc"]
        await settle()
        late = wire.call("late")  # not sent yet
        abort = asyncio.create_task(wire.exchange.abort(("a",)))
        await settle()
        if where == "submission":
            wire.is_cut = True
        else:
            error = ReplicaError("it died") if where == "news" else OSError("broken pipe")
            wire.news.put_nowait(error)
        await asyncio.sleep(2)
        for call in [*calls, late]:
            with pytest.raises(ReplicaError, match=r"cut|died|broken pipe"):
                await call
        with pytest.raises(ReplicaError):
            await abort
        for _ in range(2):
            with pytest.raises(ReplicaError):
                await wire.exchange.generate(request("later"))
            with pytest.raises(ReplicaError):
                await wire.exchange.abort(("a",))

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
        assert [(one.hears, one.streams) for one in batch.requests] == [
            (True, True),
            (False, False),
        ]
        news = News(progress=(progress("s"), progress("q")), ends=(done("s"), done("q")))
        wire.news.put_nowait(news)
        await asyncio.gather(streaming, silent)
        wire.news.put_nowait(News(progress=(progress("s"),)))
        await settle()
        assert heard == ["s"]

    virtually(scenario)


def test_an_abort_returns_when_the_replica_knows() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await asyncio.sleep(2)
        abort = asyncio.create_task(wire.exchange.abort(("a", "unknown")))
        await settle()
        assert not abort.done()
        await abort
        assert wire.batches[-1] == Batch(aborts=("a",))
        wire.news.put_nowait(News(ends=(done("a"),)))
        await call
        await wire.exchange.abort(("a",))  # ended: ignored
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
        wire.news.put_nowait(News(ends=(done("first"), done("a"))))
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
        wire.news.put_nowait(News(progress=(progress("a"),), ends=(done("a", count=5),)))
        await settle()
        assert not again.done()  # that was the end of the first
        assert heard == []
        assert wire.sent() == [["a"], ["a"]]
        wire.news.put_nowait(News(ends=(done("a", count=9),)))
        assert len((await again).token_ids) == 9

    virtually(scenario)


def test_an_abort_that_has_not_left_does_not_meet_a_later_request_of_that_id() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await asyncio.sleep(2)
        blocker = wire.call("blocker")
        await settle()
        abort = asyncio.create_task(wire.exchange.abort(("a",)))
        await settle()
        wire.news.put_nowait(News(ends=(done("a"),)))
        await call
        again = wire.call("a")
        await abort
        assert wire.batches[-1].aborts == ()
        wire.news.put_nowait(News(ends=(done("a"), done("blocker"))))
        await asyncio.gather(again, blocker)

    virtually(scenario)


@pytest.mark.parametrize("end", ["closed", "lost", "by an end"])
def test_a_loss_that_only_reaches_calls_whose_callers_are_gone_is_not_printed(end: str) -> None:
    complaints: list[dict[str, Any]] = []

    async def scenario(wire: Wire) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said))
        call, reading = wire.call("a"), asyncio.create_task(wire.exchange.read())
        await asyncio.sleep(2)
        for task in (call, reading):
            task.cancel()
        await asyncio.wait({call, reading})
        if end == "closed":
            await wire.exchange.close()
        elif end == "lost":
            wire.news.put_nowait(ReplicaError("it died"))
        else:
            error = LoopClosedError("engine loop of far was closed")
            wire.news.put_nowait(News(ends=(End(request_id="a", error=error),)))
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
            await wire.exchange.generate(request("a"))
        wire.news.put_nowait(News(ends=(done("a"),)))
        await call

    virtually(scenario)


def test_closing_fails_what_is_outstanding() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await settle()
        await wire.exchange.close()
        with pytest.raises(LoopClosedError):
            await call

    virtually(scenario)


def over_pickles(mailbox: Mailbox, latency_s: float = 0.0) -> Exchange:
    """An exchange that travels as bytes, as between processes."""

    async def submit(batch: Batch) -> None:
        await asyncio.sleep(latency_s)
        mailbox.submit(pickle.loads(pickle.dumps(batch)))

    async def collect() -> News:
        news = await mailbox.collect()
        await asyncio.sleep(latency_s)
        return pickle.loads(pickle.dumps(news))

    return Exchange("far", submit=submit, collect=collect)


@pytest.mark.parametrize("interval_s", [0.0, 0.005])
def test_a_loop_behind_a_mailbox_completes_streams_refuses_and_aborts(interval_s: float) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(step_delay_s=0.0002, max_model_len=10**6)
        with running_loop(engine, stream_interval_s=0.001, progress_interval_s=0.01) as loop:
            exchange = over_pickles(Mailbox(loop, interval_s=interval_s), latency_s=0.001)
            heard: dict[str, list[int]] = {}

            async def run(index: int) -> Completion:
                name = f"r{index}"
                hear = heard.setdefault(name, [])
                return await exchange.generate(
                    request(name, max_tokens=50),
                    lambda one: hear.extend(one.token_ids),
                    streams=index % 2 == 0,
                )

            with pytest.raises(InvalidRequestError):
                await exchange.generate(request("long", max_tokens=10**7))
            cut = asyncio.create_task(exchange.generate(request("cut", max_tokens=900_000)))
            completions = await asyncio.gather(*(run(index) for index in range(20)))
            await exchange.abort(("cut",))
            assert (await cut).finish_reason is FinishReason.ABORT
            for one in completions:
                told = heard[one.request_id]
                assert one.finish_reason is FinishReason.LENGTH
                assert tuple(told) == one.token_ids[: len(told)]
            assert sum(len(told) for told in heard.values()) > 20
            await exchange.close()

    asyncio.run(scenario())


def test_a_loop_that_fails_or_is_closed_ends_its_calls_through_the_mailbox() -> None:
    async def ends_with(loop: EngineLoop, error: type[ReplicaError]) -> None:
        exchange = over_pickles(Mailbox(loop, interval_s=0.0))
        calls = [exchange.generate(request(name, max_tokens=100)) for name in "abc"]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [error] * 3
        with pytest.raises(error):
            await exchange.generate(request("later"))
        await exchange.close()

    with running_loop(ScriptedEngine(fail_at_step=5)) as failing:
        asyncio.run(ends_with(failing, LoopFailedError))
    with running_loop(ScriptedEngine()) as closed:
        closed.close()
        asyncio.run(ends_with(closed, LoopClosedError))


def test_news_comes_at_once_and_while_requests_run_once_per_interval() -> None:
    async def scenario() -> None:
        with running_loop(ScriptedEngine()) as loop:
            box = Mailbox(loop, interval_s=1.0, idle_s=30.0)
            clock = asyncio.get_running_loop()
            assert await box.collect() == News()
            assert clock.time() == 30.0
            refused = Batch(requests=(Submission(request=request("x", prompt_len=600)),))

            async def refusals() -> list[float]:
                times = []
                for pause_s in (5.0, 0.0, 0.3, 0.0):
                    await asyncio.sleep(pause_s)
                    box.submit(refused)
                    (end,) = (await box.collect()).ends
                    assert isinstance(end.error, InvalidRequestError)
                    times.append(clock.time())
                return times

            assert await refusals() == pytest.approx([35.0, 35.0, 35.3, 35.3])
            loop.pause("keep").result(60)
            box.submit(Batch(requests=(Submission(request=request("frozen")),)))
            assert await refusals() == pytest.approx([40.3, 41.3, 42.3, 43.3])

    run_virtually(scenario())


def test_the_end_of_the_last_request_waits_for_no_interval() -> None:
    async def scenario() -> None:
        with running_loop(ScriptedEngine()) as loop:
            box = Mailbox(loop, interval_s=1e6, idle_s=1e6)
            for index in range(5):
                box.submit(Batch(requests=(Submission(request=request(f"r{index}")),)))
                async with asyncio.timeout(60):
                    (end,) = (await box.collect()).ends
                assert end.completion is not None

    asyncio.run(scenario())
