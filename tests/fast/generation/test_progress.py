"""What listeners of running requests are told: everything, once, in order, and not too often."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.fast.generation.test_loop import WAIT_S, request, running_loop, stepped_loop
from tests.support.loop_replica import loop_replica
from torchtitan_rl.generation.commands import Pause, Pull
from torchtitan_rl.generation.engine import EngineOutput
from torchtitan_rl.generation.progress import Listener, ProgressBook
from torchtitan_rl.generation.scripted import ScriptedEngine
from torchtitan_rl.types import Progress, VersionRun


@dataclass
class Hearer:
    """A sink that keeps what it heard."""

    batches: list[tuple[Progress, ...]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def hear(self, batch: tuple[Progress, ...]) -> None:
        self.batches.append(batch)
        self.threads.add(threading.current_thread().name)

    def tokens(self) -> dict[str, list[int]]:
        heard: dict[str, list[int]] = defaultdict(list)
        for batch in self.batches:
            for progress in batch:
                assert progress.start == len(heard[progress.request_id])
                assert len(progress.logprobs) == len(progress.token_ids) > 0
                heard[progress.request_id] += progress.token_ids
        return heard


def one(name: str, start: int, count: int) -> Progress:
    return Progress(
        request_id=name,
        start=start,
        token_ids=(7,) * count,
        logprobs=(-1.0,) * count,
        version_runs=(VersionRun(0, 0),),
    )


class OnlyUnfinished(ScriptedEngine):
    """Is never asked about a request that has ended."""

    def sampled_since(self, starts: Mapping[str, int]) -> list[EngineOutput]:
        assert set(starts) <= set(self.generated_lengths())
        return super().sampled_since(starts)


def test_what_is_told_is_a_beginning_of_the_completion() -> None:
    hearer = Hearer()
    listener = Listener(sink=hearer.hear, streams=True)
    with running_loop(OnlyUnfinished(), stream_interval_s=0.0) as loop:
        loop.submit(request("before", 3), listener).result(WAIT_S)
        hearer.batches.clear()
        futures = {name: loop.submit(request(name, 20), listener) for name in "abc"}
        quiet = loop.submit(request("quiet", 20))
        done = {name: future.result(WAIT_S) for name, future in futures.items()}
        quiet.result(WAIT_S)
    heard = hearer.tokens()
    assert set(heard) == set("abc")
    for name, tokens in heard.items():
        assert tuple(tokens) == done[name].token_ids[:19]  # the last one comes with the completion


def test_all_requests_of_a_sink_are_told_in_one_call_per_reading() -> None:
    hearer = Hearer()
    listener = Listener(sink=hearer.hear, streams=True)
    with stepped_loop(stream_interval_s=0.0) as (loop, engine):
        for name in "abc":
            loop.submit(request(name, 10), listener)
        engine.asked.acquire(timeout=WAIT_S)
        engine.allow(5)
        assert len(hearer.batches) <= 5
        assert max(len(batch) for batch in hearer.batches) == 3


def test_versions_that_are_told_are_exact_across_a_pull() -> None:
    hearer = Hearer()
    listener = Listener(sink=hearer.hear, streams=True)
    with stepped_loop(stream_interval_s=0.0) as (loop, engine):
        future = loop.submit(request("a", 8), listener)
        engine.asked.acquire(timeout=WAIT_S)
        engine.allow(3)
        pulled = loop.execute(Pull(1))
        engine.allow(1)  # the step that was under way; then the pull
        pulled.result(WAIT_S)
        engine.permits.release(8)
        done = future.result(WAIT_S)
    assert len(done.version_runs) == 2
    for batch in hearer.batches:
        (progress,) = batch
        end = progress.start + len(progress.token_ids)
        assert progress.version_runs == tuple(r for r in done.version_runs if r.start < end)


def test_a_pause_tells_everything_before_it_is_acknowledged() -> None:
    hearer = Hearer()
    with stepped_loop(progress_interval_s=1e9) as (loop, engine):
        loop.submit(request("a", 100), Listener(sink=hearer.hear))
        engine.asked.acquire(timeout=WAIT_S)
        engine.allow(5)
        assert hearer.batches == []  # it does not stream
        pause = loop.execute(Pause("keep"))
        engine.permits.release()
        pause.result(WAIT_S)
        assert len(hearer.tokens()["a"]) == 6


def test_a_request_nobody_listens_to_is_never_read() -> None:
    class Unread(ScriptedEngine):
        def sampled_since(self, starts):  # type: ignore[no-untyped-def]
            raise AssertionError("nobody listens")

    with running_loop(Unread(), stream_interval_s=0.0, progress_interval_s=0.0) as loop:
        assert len(loop.submit(request("a", 20)).result(WAIT_S).token_ids) == 20


def test_who_streams_hears_at_once_after_a_silence_and_then_once_per_interval() -> None:
    book = ProgressBook(stream_interval_s=0.02, interval_s=1.0)
    book.follow("a", Listener(sink=print, streams=True), 5.0)
    assert book.due(5.0) == {"a": 0}
    assert book.due(5.001) == {"a": 0}  # nothing was sampled yet
    book.tell([one("a", 0, 1)], 5.002)
    assert book.due(5.01) == {}
    assert book.due(5.03) == {"a": 1}


def test_who_does_not_stream_is_read_every_second_with_all_others() -> None:
    book = ProgressBook(stream_interval_s=0.02, interval_s=1.0)
    book.follow("slow", Listener(sink=print), 5.0)
    book.follow("a", Listener(sink=print, streams=True), 5.0)
    assert book.due(5.5) == {"a": 0}
    assert book.due(6.0) == {"a": 0, "slow": 0}
    assert book.due(6.1, at_once=True) == {"a": 0, "slow": 0}
    book.forget("a")
    assert book.due(6.2) == {}
    book.forget("slow")
    assert book.due(9.0, at_once=True) == {}


@pytest.mark.parametrize("streams", [True, False])
def test_a_replica_tells_on_the_event_loop_and_never_after_the_completion(streams: bool) -> None:
    async def scenario() -> None:
        intervals = {"stream_interval_s": 0.0, "progress_interval_s": 0.0}
        with running_loop(ScriptedEngine(), **intervals) as loop:
            replica = loop_replica("r", loop)
            heard: dict[str, list[int]] = defaultdict(list)
            ended: set[str] = set()

            def hear(progress: Progress) -> None:
                assert threading.current_thread() is threading.main_thread()
                assert progress.request_id not in ended
                heard[progress.request_id] += progress.token_ids

            async def run(name: str) -> None:
                done = await replica.generate(request(name, 30), hear, streams=streams)
                ended.add(name)
                assert tuple(heard[name]) == done.token_ids[: len(heard[name])]
                assert len(heard[name]) >= 20

            await asyncio.gather(*(run(str(n)) for n in range(8)))
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
