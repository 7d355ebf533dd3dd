"""The engine loop on the scripted engine: batching, aborts, pulls, and every way to end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torchtitan_rl.errors import (
    InvalidRequestError,
    LoopClosedError,
    LoopFailedError,
    WeightSyncError,
)
from torchtitan_rl.generation.decision import KvPolicy
from torchtitan_rl.generation.lockstep import SoloChannel, make_threaded_channels
from torchtitan_rl.generation.loop import EngineLoop, LoopConfig
from torchtitan_rl.generation.scripted import ScriptedEngine, scripted_token
from torchtitan_rl.types import FinishReason, GenerationRequest, SamplingParams, VersionRun

WAIT_S = 20.0


class SteppedEngine(ScriptedEngine):
    """A scripted engine whose steps wait for permission."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.permits = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)

    def step(self) -> list:
        self.asked.release()
        assert self.permits.acquire(timeout=WAIT_S)
        return super().step()

    def allow(self, steps: int) -> None:
        """Let ``steps`` steps run and wait until the loop asks for the one after."""
        for _ in range(steps):
            self.permits.release()
            assert self.asked.acquire(timeout=WAIT_S)


def request(name: str, max_tokens: int = 4, *, prompt: tuple[int, ...] = (1, 2, 3)):
    return GenerationRequest(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens)
    )


@contextmanager
def running_loop(engine: ScriptedEngine, **config: object) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, SoloChannel(), is_leader=True, config=LoopConfig(**config))
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


def test_a_short_request_submitted_after_a_long_one_ends_first() -> None:
    with stepped_loop() as (loop, engine):
        long = loop.submit(request("long", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        short = loop.submit(request("short", 2))
        engine.allow(4)
        assert short.result(WAIT_S).finish_reason is FinishReason.LENGTH
        assert not long.done()


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
        pull = loop.pull(7)
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
        first, second = loop.pull(1), loop.pull(2)
        engine.allow(1)
        assert first.result(WAIT_S).version == second.result(WAIT_S).version == 2
        assert engine.version == 2


def test_trap_3_a_refused_cache_reset_fails_the_pull_when_running_requests_recompute() -> None:
    class NeverResets(ScriptedEngine):
        def reset_prefix_cache(self, *, recompute_running: bool) -> bool:
            return False

    with running_loop(NeverResets()) as loop:
        with pytest.raises(LoopFailedError) as caught:
            loop.pull(1).result(WAIT_S)
        assert isinstance(caught.value.__cause__, WeightSyncError)


def test_a_refused_reset_is_expected_beside_running_requests_that_keep_their_kv() -> None:
    engine = SteppedEngine()
    with running_loop(engine, kv_policy=KvPolicy(recompute_running=False)) as loop:
        loop.submit(request("a", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        pull = loop.pull(1)
        engine.allow(1)
        assert pull.result(WAIT_S).recomputed is False
        assert engine.cache_resets == 0


def test_an_idle_engine_pulls_without_requests() -> None:
    with running_loop(ScriptedEngine()) as loop:
        report = loop.pull(3).result(WAIT_S)
        assert (report.running_requests, report.recomputed) == (0, False)
        assert loop.submit(request("a", 1)).result(WAIT_S).versions == (3,)


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
        def add_request(self, admission) -> None:
            if admission.request.request_id == "bad":
                raise InvalidRequestError("not to my taste")
            super().add_request(admission)

    with running_loop(Picky()) as loop:
        bad, good = loop.submit(request("bad")), loop.submit(request("good"))
        with pytest.raises(InvalidRequestError, match="taste"):
            bad.result(WAIT_S)
        assert len(good.result(WAIT_S).token_ids) == 4
        assert len(loop.submit(request("good", 2)).result(WAIT_S).token_ids) == 2


def test_trap_2_a_failed_step_fails_running_queued_and_later_calls_with_its_cause() -> None:
    engine = SteppedEngine(fail_at_step=2)
    ended = []
    loop = EngineLoop(engine, SoloChannel(), is_leader=True, on_end=ended.append)
    loop.start()
    running = loop.submit(request("running", 50))
    assert engine.asked.acquire(timeout=WAIT_S)
    queued, pull = loop.submit(request("queued")), loop.pull(1)
    engine.permits.release(10)
    assert loop.join(WAIT_S)
    # The pull was applied before the failing step; all else fails.
    assert pull.result(WAIT_S).version == 1
    for future in (running, queued, loop.submit(request("later")), loop.pull(2)):
        with pytest.raises(LoopFailedError) as caught:
            future.result(WAIT_S)
        assert "scripted failure" in str(caught.value.__cause__)
    assert ended == [loop.failure]
    loop.close(WAIT_S)


def test_trap_2_a_failed_pull_fails_everything() -> None:
    engine = SteppedEngine(fail_at_pull=1)
    with running_loop(engine) as loop:
        running = loop.submit(request("running", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        pull = loop.pull(1)
        engine.permits.release(10)
        for future in (pull, running):
            with pytest.raises(LoopFailedError):
                future.result(WAIT_S)
        assert isinstance(loop.failure.__cause__, WeightSyncError)


def test_close_ends_every_outstanding_and_every_later_future() -> None:
    with stepped_loop() as (loop, engine):
        running, pull = loop.submit(request("a", 50)), loop.pull(1)
        engine.permits.release(1000)
        loop.close(WAIT_S)
        for future in (running, loop.submit(request("b")), loop.pull(2)):
            with pytest.raises(LoopClosedError):
                future.result(WAIT_S)
        assert pull.done()
        assert loop.failure is None
        assert engine.is_closed


def test_a_future_cannot_be_cancelled_under_the_loop() -> None:
    with stepped_loop() as (loop, engine):
        future = loop.submit(request("a", 2))
        assert not future.cancel()
        engine.permits.release(10)
        assert len(future.result(WAIT_S).token_ids) == 2
        assert loop.failure is None


def test_metrics_count_the_requests_in_flight_when_the_last_step_began() -> None:
    with stepped_loop() as (loop, engine):
        futures = [loop.submit(request(name, 2)) for name in "abc"]
        engine.permits.release(20)
        metrics = [future.result(WAIT_S).metrics for future in futures]
    # The loop may have admitted the first alone; those that ended together count each other.
    assert metrics[2].requests_in_flight in (2, 3)
    for metric in metrics:
        assert 0.0 <= metric.queue_s <= metric.time_to_first_token_s
        assert metric.inter_token_latency_s == metric.decode_s


def test_stats_count_requests_that_are_still_in_the_inbox_as_waiting() -> None:
    with stepped_loop() as (loop, engine):
        loop.submit(request("a", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        before = loop.stats().waiting
        loop.submit(request("b", 50))
        assert loop.stats().waiting == before + 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_apply_the_same_decisions_in_the_same_order(world_size: int) -> None:
    class Recording(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(vocab_size=50, eos_token_id=7, max_running=4)
            self.journal: list[object] = []

        def add_request(self, admission) -> None:
            self.journal.append((admission.request.request_id, admission.arrival_s))
            super().add_request(admission)

        def abort(self, request_ids):
            self.journal.append(request_ids)
            return super().abort(request_ids)

        def step(self):
            outputs = super().step()
            self.journal.append([(o.request_id, o.token_ids) for o in outputs])
            return outputs

        def swap_weights(self, version: int) -> None:
            self.journal.append(version)
            super().swap_weights(version)

    engines = [Recording() for _ in range(world_size)]
    loops = [
        EngineLoop(engine, channel, is_leader=rank == 0, config=LoopConfig(heartbeat_s=0.01))
        for rank, (engine, channel) in enumerate(
            zip(engines, make_threaded_channels(world_size), strict=True)
        )
    ]
    for loop in loops:
        loop.start()
    leader = loops[0]
    futures = [leader.submit(request(f"r{n}", 5 + n, prompt=(n,))) for n in range(12)]
    pull = leader.pull(1)
    leader.abort(("r11",))
    for future in futures:
        future.result(WAIT_S)
    assert pull.result(WAIT_S).version == 1
    leader.close(WAIT_S)
    assert all(loop.join(WAIT_S) for loop in loops)
    assert all(loop.failure is None for loop in loops)
    assert all(engine.is_closed for engine in engines)
    assert all(engine.journal == engines[0].journal for engine in engines)
    with pytest.raises(RuntimeError, match="rank 0"):
        loops[1].submit(request("x"))


def test_what_decodes_waits_for_no_further_decision_behind_a_pull() -> None:
    journal: list[str] = []

    class Recording(SteppedEngine):
        def step(self) -> list:
            outputs = super().step()
            journal.append("step")
            return outputs

        def swap_weights(self, version: int) -> None:
            journal.append("swap")
            super().swap_weights(version)

    class Channel:
        world_size = 2

        def broadcast(self, data: bytes | None) -> bytes:
            assert data is not None
            journal.append("broadcast")
            return data

    engine = Recording()
    loop = EngineLoop(
        engine, Channel(), is_leader=True, config=LoopConfig(max_steps_per_decision=1)
    )
    loop.start()
    future = loop.submit(request("a", 100))
    engine.allow(2)
    pull = loop.pull(1)
    engine.allow(2)
    engine.permits.release(1000)
    assert pull.result(WAIT_S).running_requests == 1
    future.result(WAIT_S)
    loop.close(WAIT_S)
    swap = journal.index("swap")
    assert journal[swap - 1 : swap + 3] == ["broadcast", "swap", "step", "broadcast"]


def test_an_idle_leader_of_several_ranks_sends_empty_decisions() -> None:
    channels = make_threaded_channels(2)
    sent = threading.Semaphore(0)
    broadcast = channels[0].broadcast

    class Counting:
        world_size = 2

        def broadcast(self, data: bytes | None) -> bytes:
            sent.release()
            return broadcast(data)

    config = LoopConfig(heartbeat_s=0.005)
    loops = [
        EngineLoop(ScriptedEngine(), Counting(), is_leader=True, config=config),
        EngineLoop(ScriptedEngine(), channels[1], is_leader=False, config=config),
    ]
    for loop in loops:
        loop.start()
    for _ in range(3):
        assert sent.acquire(timeout=WAIT_S)
    loops[0].close(WAIT_S)
    assert loops[1].join(WAIT_S)


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


def test_trap_14_a_failed_broadcast_fails_everything() -> None:
    class Broken:
        world_size = 2

        def broadcast(self, data: bytes | None) -> bytes:
            raise ConnectionError("peer is gone")

    loop = EngineLoop(ScriptedEngine(), Broken(), is_leader=True)
    loop.start()
    with pytest.raises(LoopFailedError) as caught:
        loop.submit(request("a")).result(WAIT_S)
    assert isinstance(caught.value.__cause__, ConnectionError)
