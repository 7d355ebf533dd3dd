"""The engine loop on the scripted engine: batching, aborts, pulls, and every way to end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.scripted_engine import (
    WAIT_S,
    GivingUpEngine,
    ScriptedEngine,
    SteppedEngine,
    request,
    scripted_token,
)
from torchtitan_rl.errors import (
    InvalidRequestError,
    LoopClosedError,
    LoopFailedError,
    RequestGivenUpError,
    StepFailedError,
    WeightSyncError,
)
from torchtitan_rl.generation.commands import Pull
from torchtitan_rl.generation.config import LoopConfig
from torchtitan_rl.generation.decision import KvPolicy
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.types import EngineStats, FinishReason, GenerationRequest, VersionRun


@contextmanager
def running_loop(engine: ScriptedEngine, **config: object) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, None, is_leader=True, config=LoopConfig(**config))
    loop.start()
    try:
        yield loop
    finally:
        if isinstance(engine, SteppedEngine):
            engine.permits.release(1000)
        loop.close(WAIT_S)


@contextmanager
def stepped_loop(**config: object) -> Iterator[tuple[EngineLoop, SteppedEngine]]:
    engine = SteppedEngine()
    with running_loop(engine, **config) as loop:
        yield loop, engine


def test_a_completion_holds_the_tokens_the_engine_sampled() -> None:
    with running_loop(ScriptedEngine(vocab_size=100), name="replica-3") as loop:
        done = loop.submit(request("a", 5)).result(WAIT_S)
    tokens = [1, 2, 3]
    for token, logprob in zip(done.token_ids, done.logprobs, strict=True):
        assert (token, logprob) == scripted_token(tokens, seed=None, version=0, vocab_size=100)
        tokens.append(token)
    assert len(done.token_ids) == 5
    assert done.finish_reason is FinishReason.LENGTH
    assert done.versions == (0, 0, 0, 0, 0)
    assert done.replica == "replica-3"


def test_an_abort_keeps_the_tokens_so_far() -> None:
    with stepped_loop() as (loop, engine):
        future = loop.submit(request("a", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        engine.allow(3)
        loop.abort(("a", "unknown"))
        engine.permits.release()
        done = future.result(WAIT_S)
    assert done.finish_reason is FinishReason.ABORT
    assert len(done.token_ids) == len(done.logprobs) == 4


class CachedEngine(ScriptedEngine):
    """Holds 64 tokens; every token of a request takes a place, and all requests run."""

    most_used = 0.0

    def __init__(self) -> None:
        super().__init__(max_running=1000)
        self.started: list[str] = []

    def add_request(self, request: GenerationRequest, *, arrival_s: float) -> None:
        super().add_request(request, arrival_s=arrival_s)
        self.started.append(request.request_id)

    def stats(self) -> EngineStats:
        lengths = self.generated_lengths().values()
        used = sum(3 + length for length in lengths) / 64  # `request` has prompts of 3 tokens
        self.most_used = max(self.most_used, used)
        return replace(super().stats(), kv_use=used, kv_tokens=64)


def test_requests_start_in_order_when_the_cache_has_room() -> None:
    engine, names = CachedEngine(), [str(number) for number in range(200)]
    with running_loop(engine) as loop:
        futures = [loop.submit(request(name, 8)) for name in names]
        done = [future.result(WAIT_S) for future in futures]
    assert {len(one.token_ids) for one in done} == {8}
    assert engine.started == names
    assert engine.most_used < 4  # all at once would use 34 caches


def test_trap_9_aborted_before_the_first_token_is_a_completion_without_tokens() -> None:
    with stepped_loop() as (loop, engine):
        loop.submit(request("busy", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        future = loop.submit(request("a"))
        loop.abort(("a",))
        engine.permits.release()
        done = future.result(WAIT_S)
    assert (done.token_ids, done.version_runs) == ((), ())
    assert done.finish_reason is FinishReason.ABORT


def test_trap_5_versions_change_at_the_token_where_the_weights_did() -> None:
    with stepped_loop() as (loop, engine):
        future = loop.submit(request("a", 6))
        assert engine.asked.acquire(timeout=WAIT_S)
        engine.allow(2)
        pull = loop.execute(Pull(7))
        engine.allow(1)
        report = pull.result(WAIT_S)
        engine.permits.release(10)
        done = future.result(WAIT_S)
    assert (report.version, report.running_requests, report.recomputed) == (7, 1, True)
    assert done.version_runs == (VersionRun(0, 0), VersionRun(3, 7))
    expected, _ = scripted_token(
        (1, 2, 3, *done.token_ids[:3]), seed=None, version=7, vocab_size=1000
    )
    assert done.token_ids[3] == expected


def test_trap_4_of_two_waiting_pulls_the_latest_wins_and_both_callers_are_told() -> None:
    with stepped_loop() as (loop, engine):
        loop.submit(request("a", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        first, second = loop.execute(Pull(1)), loop.execute(Pull(2))
        engine.allow(1)
        assert first.result(WAIT_S).version == second.result(WAIT_S).version == 2
        assert engine.version == 2


def test_trap_3_a_refused_cache_reset_fails_the_pull_when_running_requests_recompute() -> None:
    class NeverResets(ScriptedEngine):
        def reset_prefix_cache(self, *, recompute_running: bool) -> bool:
            return False

    with running_loop(NeverResets()) as loop:
        with pytest.raises(LoopFailedError) as caught:
            loop.execute(Pull(1)).result(WAIT_S)
        assert isinstance(caught.value.__cause__, WeightSyncError)


def test_a_refused_reset_is_expected_beside_running_requests_that_keep_their_kv() -> None:
    engine = SteppedEngine()
    with running_loop(engine, kv_policy=KvPolicy(recompute_running=False)) as loop:
        loop.submit(request("a", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        pull = loop.execute(Pull(1))
        engine.allow(1)
        assert pull.result(WAIT_S).recomputed is False
        assert engine.cache_resets == 0


def test_trap_35_an_invalid_request_fails_alone() -> None:
    with stepped_loop() as (loop, engine):
        good = loop.submit(request("good", 2))
        with pytest.raises(InvalidRequestError, match="max_model_len = 512"):
            loop.submit(request("long", prompt=tuple(range(600))))
        with pytest.raises(InvalidRequestError, match="still outstanding"):
            loop.submit(request("good", 2))
        engine.permits.release(10)
        assert len(good.result(WAIT_S).token_ids) == 2
        assert len(loop.submit(request("good", 2)).result(WAIT_S).token_ids) == 2


def test_a_request_that_the_engine_refuses_fails_alone() -> None:
    class Picky(ScriptedEngine):
        def add_request(self, request, *, arrival_s: float) -> None:
            if request.request_id == "bad":
                raise InvalidRequestError("not to my taste")
            super().add_request(request, arrival_s=arrival_s)

    with running_loop(Picky()) as loop:
        bad, good = loop.submit(request("bad")), loop.submit(request("good"))
        with pytest.raises(InvalidRequestError, match="taste"):
            bad.result(WAIT_S)
        assert len(good.result(WAIT_S).token_ids) == 4
        assert len(loop.submit(request("good", 2)).result(WAIT_S).token_ids) == 2


def test_a_request_that_the_engine_gives_up_fails_alone_and_its_id_can_be_used_again() -> None:
    with running_loop(GivingUpEngine()) as loop:
        for _ in range(2):
            good = loop.submit(request("good", 20))
            bad = loop.submit(request("bad", 5))
            with pytest.raises(RequestGivenUpError, match="no token is left") as raised:
                bad.result(WAIT_S)
            assert len(raised.value.completion.token_ids) == 5
            assert isinstance(raised.value, InvalidRequestError)
            assert len(good.result(WAIT_S).token_ids) == 20
        assert loop.failure is None


def test_trap_2_a_failed_step_fails_running_queued_and_later_calls_with_its_cause() -> None:
    engine = SteppedEngine(fail_at_step=2)
    ended = []
    loop = EngineLoop(engine, None, is_leader=True, on_end=ended.append)
    loop.start()
    running = loop.submit(request("running", 50))
    assert engine.asked.acquire(timeout=WAIT_S)
    queued, pull = loop.submit(request("queued")), loop.execute(Pull(1))
    engine.permits.release(10)
    assert loop.join(WAIT_S)
    # The pull was applied before the failing step; all else fails.
    assert pull.result(WAIT_S).version == 1
    for future in (running, queued, loop.submit(request("later")), loop.execute(Pull(2))):
        with pytest.raises(StepFailedError) as caught:
            future.result(WAIT_S)
        assert "scripted failure" in str(caught.value.__cause__)
    assert ended == [loop.failure]
    loop.close(WAIT_S)
    with pytest.raises(LoopFailedError):  # the first cause stays
        loop.submit(request("after the close")).result(WAIT_S)


def test_trap_2_a_failed_pull_fails_everything() -> None:
    engine = SteppedEngine(fail_at_pull=1)
    with running_loop(engine) as loop:
        running = loop.submit(request("running", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        pull = loop.execute(Pull(1))
        engine.permits.release(10)
        for future in (pull, running):
            with pytest.raises(LoopFailedError) as caught:
                future.result(WAIT_S)
            assert type(caught.value) is LoopFailedError  # no request is blamed
        assert isinstance(loop.failure.__cause__, WeightSyncError)


def test_close_ends_every_outstanding_and_every_later_future() -> None:
    with stepped_loop() as (loop, engine):
        running, pull = loop.submit(request("a", 50)), loop.execute(Pull(1))
        engine.permits.release(1000)
        loop.close(WAIT_S)
        for future in (running, loop.submit(request("b")), loop.execute(Pull(2))):
            with pytest.raises(LoopClosedError):
                future.result(WAIT_S)
        assert pull.done()
        assert loop.failure is None
        assert engine.is_closed


def test_an_idle_loop_of_one_rank_sleeps_until_notified() -> None:
    class Counting(ScriptedEngine):
        readings = 0

        def stats(self):
            self.readings += 1
            return super().stats()

    engine = Counting()
    with running_loop(engine, heartbeat_s=0.001) as loop:
        loop.submit(request("a", 1)).result(WAIT_S)
        threading.Event().wait(0.05)
    assert engine.readings <= 6  # one per decision; a spinning loop makes thousands
