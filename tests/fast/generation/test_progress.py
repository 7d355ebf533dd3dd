"""What listeners of running requests get: all progress, once, in order, and not too often."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fast.generation.test_loop import WAIT_S, request, running_loop, stepped_loop
from tests.support.scripted_engine import ScriptedEngine
from torchtitan_rl.generation.commands import EngineCommand, Pause, Pull, ReadTokens
from torchtitan_rl.generation.requests import OutstandingRequests
from torchtitan_rl.types import Completion, FinishReason, Progress


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


def sampled(name: str, count: int) -> Progress:
    return Progress(
        request_id=name,
        start=0,
        token_ids=(7,) * count,
        logprobs=(-1.0,) * count,
        version_runs=(),
    )


def ended(name: str) -> Completion:
    return Completion(
        request_id=name,
        token_ids=(7,),
        logprobs=(-1.0,),
        version_runs=(),
        finish_reason=FinishReason.STOP,
    )


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def outstanding(clock: Clock, **streams: bool) -> OutstandingRequests:
    """With a sink for each of these requests, all of which are admitted."""
    requests = OutstandingRequests(
        version=0, replica="r", stream_interval_s=0.02, interval_s=1.0, clock=clock
    )
    for name, is_streaming in streams.items():
        requests.add(name, print, streams=is_streaming)
        requests.admit(name)
    return requests


class OnlyUnfinished(ScriptedEngine):
    """Is never asked about a request that has ended."""

    def sampled_since(self, starts: Mapping[str, int]) -> list[Progress]:
        assert set(starts) <= set(self.generated_lengths())
        return super().sampled_since(starts)


def test_what_is_told_is_a_beginning_of_the_completion() -> None:
    hearer = Hearer()
    with running_loop(OnlyUnfinished(), stream_interval_s=0.0) as loop:
        loop.submit(request("before", 3), hearer.hear, streams=True).result(WAIT_S)
        hearer.batches.clear()
        futures = {
            name: loop.submit(request(name, 20), hearer.hear, streams=True) for name in "abc"
        }
        quiet = loop.submit(request("quiet", 20))
        done = {name: future.result(WAIT_S) for name, future in futures.items()}
        quiet.result(WAIT_S)
    heard = hearer.tokens()
    assert set(heard) == set("abc")
    for name, tokens in heard.items():
        assert tuple(tokens) == done[name].token_ids[:19]  # the last one comes with the completion


def test_versions_that_are_told_are_exact_across_a_pull() -> None:
    hearer = Hearer()
    with stepped_loop(stream_interval_s=0.0) as (loop, engine):
        future = loop.submit(request("a", 8), hearer.hear, streams=True)
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


@pytest.mark.parametrize("command", [Pause("keep"), ReadTokens()])
def test_a_pause_and_a_reading_report_all_progress_before_they_are_answered(
    command: EngineCommand[Any],
) -> None:
    hearer = Hearer()
    with stepped_loop(progress_interval_s=1e9) as (loop, engine):
        loop.submit(request("a", 100), hearer.hear)
        loop.submit(request("unheard", 100))
        engine.asked.acquire(timeout=WAIT_S)
        engine.allow(5)
        assert hearer.batches == []  # it does not stream
        answered: list[int] = []
        answer = loop.execute(command)
        answer.add_done_callback(lambda _: answered.append(len(hearer.tokens()["a"])))
        engine.permits.release()
        reading = answer.result(WAIT_S)
        assert answered == [6]
        if reading is not None:
            sampled = engine.stats().generated_tokens
            assert (reading.sampled_tokens, reading.running_tokens) == (sampled, sampled)


def test_a_streaming_request_is_due_at_once_after_a_silence_and_then_once_per_interval() -> None:
    clock = Clock()
    requests = outstanding(clock, a=True)
    assert requests.due() == {"a": 0}
    clock.now_s = 5.001
    assert requests.due() == {"a": 0}  # nothing was sampled yet
    clock.now_s = 5.002
    requests.report([sampled("a", 1)])
    clock.now_s = 5.01
    assert requests.due() == {}
    clock.now_s = 5.03
    assert requests.due() == {"a": 1}
