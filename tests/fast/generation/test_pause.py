"""Pauses, and reading what running requests have, on one rank and on several."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.fast.generation.test_loop import SteppedEngine, request, running_loop
from tests.support.async_tests import on_event_loop
from tests.support.loop_replica import loop_replica
from tests.support.scripted_engine import ScriptedEngine
from tests.support.threaded_channel import make_threaded_channels
from torchtitan_rl.errors import GenerationError, LoopClosedError, LoopFailedError
from torchtitan_rl.generation.commands import Pause, Pull, ReadStats, ReadTokens, Resume
from torchtitan_rl.generation.config import LoopConfig
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import FinishReason, VersionRun

WAIT_S = 20.0


class TriggeredEngine(ScriptedEngine):
    """``triggers[n]`` runs inside the n-th step, in the loop's thread."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.triggers: dict = {}
        self.steps = 0

    def step(self) -> list:
        self.steps += 1
        if trigger := self.triggers.pop(self.steps, None):
            trigger()
        return super().step()


def undisturbed(max_tokens: int) -> tuple[int, ...]:
    with running_loop(ScriptedEngine()) as loop:
        return loop.submit(request("a", max_tokens)).result(WAIT_S).token_ids


def test_keep_freezes_running_requests_and_holds_new_ones_until_resume() -> None:
    engine, pauses = TriggeredEngine(), []
    engine.triggers[3] = lambda: pauses.append(loop.execute(Pause("keep")))
    with running_loop(engine) as loop:
        running = loop.submit(request("a", 40))
        while not pauses:
            pass
        pauses[0].result(WAIT_S)
        new = loop.submit(request("b", 2))
        assert loop.execute(ReadTokens()).result(WAIT_S).running_tokens == engine.steps == 3
        assert not running.done()
        assert not new.done()
        loop.execute(Resume())
        assert running.result(WAIT_S).token_ids == undisturbed(40)
        assert new.result(WAIT_S).finish_reason is FinishReason.LENGTH


def test_abort_empties_the_engine_and_keeps_the_tokens() -> None:
    engine, pauses = TriggeredEngine(max_running=1), []
    engine.triggers[3] = lambda: pauses.append(loop.execute(Pause("abort")))
    with running_loop(engine) as loop:
        futures = [loop.submit(request(name, 40)) for name in "ab"]
        done = [future.result(WAIT_S) for future in futures]
        pauses[0].result(WAIT_S)
        assert engine.num_unfinished() == 0
        assert [one.finish_reason for one in done] == [FinishReason.ABORT] * 2
        assert (len(done[0].token_ids), done[1].token_ids) == (3, ())
        late = loop.submit(request("c", 2))
        loop.execute(Resume())
        assert len(late.result(WAIT_S).token_ids) == 2


def test_wait_lets_running_requests_finish_and_new_ones_queue() -> None:
    engine, seen = TriggeredEngine(), {}

    def pause() -> None:
        seen["pause"] = loop.execute(Pause("wait"))
        seen["new"] = loop.submit(request("b", 2))

    engine.triggers[3] = pause
    with running_loop(engine) as loop:
        running = loop.submit(request("a", 9))
        assert len(running.result(WAIT_S).token_ids) == 9
        seen["pause"].result(WAIT_S)
        assert engine.steps == 9
        assert loop.execute(ReadStats()).result().waiting == 1
        assert not seen["new"].done()
        loop.execute(Resume())
        seen["new"].result(WAIT_S)


def test_wait_lets_the_requests_of_an_earlier_pause_finish() -> None:
    engine, pauses = TriggeredEngine(), []
    engine.triggers[3] = lambda: pauses.append(loop.execute(Pause("keep")))
    with running_loop(engine) as loop:
        running = loop.submit(request("a", 9))
        while not pauses:
            pass
        pauses[0].result(WAIT_S)
        loop.execute(Pause("wait")).result(WAIT_S)
        assert running.result(WAIT_S).token_ids == undisturbed(9)


def test_while_paused_weights_are_pulled_and_requests_aborted() -> None:
    engine, pauses = TriggeredEngine(), []
    engine.triggers[3] = lambda: pauses.append(loop.execute(Pause("keep")))
    with running_loop(engine) as loop:
        running, other = loop.submit(request("a", 9)), loop.submit(request("b", 9))
        while not pauses:
            pass
        pauses[0].result(WAIT_S)
        queued = loop.submit(request("c", 9))
        loop.abort(("b", "c"))
        assert len(other.result(WAIT_S).token_ids) == 3
        assert queued.result(WAIT_S).token_ids == ()
        assert loop.execute(Pull(7)).result(WAIT_S).version == 7
        assert engine.steps == 3
        loop.execute(Resume())
        assert running.result(WAIT_S).version_runs == (VersionRun(0, 0), VersionRun(3, 7))


def test_a_pause_that_resume_overtakes_is_told_so() -> None:
    engine, pauses = SteppedEngine(), []
    with running_loop(engine) as loop:
        loop.submit(request("a", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        pauses.append(loop.execute(Pause("wait")))
        loop.execute(Resume())
        with pytest.raises(GenerationError, match="resumed before it was paused"):
            pauses[0].result(WAIT_S)


def test_trap_2_pauses_and_readings_end_with_the_loop() -> None:
    engine = SteppedEngine(fail_at_step=1)
    with running_loop(engine) as loop:
        loop.submit(request("a", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        asked = [loop.execute(Pause("keep")), loop.execute(ReadTokens()), loop.execute(Pull(1))]
        engine.permits.release()
        for future in asked:
            with pytest.raises(LoopFailedError):
                future.result(WAIT_S)
    closed = EngineLoop(ScriptedEngine(), None, is_leader=True)
    closed.close()
    for future in (closed.execute(Pause("keep")), closed.execute(ReadTokens())):
        with pytest.raises(LoopClosedError):
            future.result(WAIT_S)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_trap_1_a_pause_is_acknowledged_when_no_rank_is_in_a_step(mode) -> None:
    class Rank(TriggeredEngine):
        is_stepping = False
        delay = threading.Event()

        def step(self) -> list:
            self.is_stepping = True
            self.delay.wait(0.002)
            outputs = super().step()
            self.is_stepping = False
            return outputs

    class SlowRank(Rank):
        def step(self) -> list:
            self.is_stepping = True
            self.delay.wait(0.02)
            return super().step()

    engines = [Rank(), SlowRank(), SlowRank()]
    loops = [
        EngineLoop(engine, channel, is_leader=rank == 0, config=LoopConfig(heartbeat_s=0.01))
        for rank, (engine, channel) in enumerate(
            zip(engines, make_threaded_channels(3), strict=True)
        )
    ]
    leader = loops[0]
    stepping: list[list[bool]] = []
    pauses = []

    def pause() -> None:
        pauses.append(leader.execute(Pause(mode)))
        pauses[0].add_done_callback(lambda _: stepping.append([e.is_stepping for e in engines]))

    engines[0].triggers[5] = pause
    for loop in loops:
        loop.start()
    futures = [leader.submit(request(name, 12)) for name in "abc"]
    while not pauses:
        pass
    pauses[0].result(WAIT_S)
    reading = leader.execute(ReadTokens()).result(WAIT_S)
    steps = [engine.steps for engine in engines]
    assert stepping == [[False, False, False]]
    assert len(set(steps)) == 1
    assert reading.running_tokens == (3 * steps[0] if mode == "keep" else 0)
    assert [engine.steps for engine in engines] == steps
    leader.execute(Resume())
    reasons = {future.result(WAIT_S).finish_reason for future in futures}
    assert reasons == ({FinishReason.ABORT} if mode == "abort" else {FinishReason.LENGTH})
    leader.close()
    for loop in loops:
        assert loop.join(WAIT_S)
        assert loop.failure is None


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
@on_event_loop
async def test_requests_through_paused_replicas_equal_undisturbed_ones(mode) -> None:
    expected = undisturbed(200)

    loops = [EngineLoop(ScriptedEngine(step_delay_s=0.0005), None, is_leader=True)]
    loops[0].start()
    router = GeneratorRouter([loop_replica("r", loops[0])])
    calls = [asyncio.create_task(router.generate(request(f"a{i}", 200))) for i in range(4)]
    for _ in range(5):
        await asyncio.sleep(0.01)
        await router.pause(mode=mode)
        partials = await router.partials()
        late = asyncio.create_task(router.generate(request("late", 1)))
        await asyncio.sleep(0.002)
        assert await router.partials() == {
            **partials,
            "late": (await router.partials())["late"],
        }
        assert not late.done()
        for partial in partials.values():
            assert partial.token_ids == expected[: len(partial.token_ids)]
        await router.resume()
        await late
    for done in await asyncio.gather(*calls):
        assert done.token_ids == expected
        assert done.finish_reason is FinishReason.LENGTH
    await router.close()
