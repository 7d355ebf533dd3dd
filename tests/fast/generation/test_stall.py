"""Progress decides whether an engine is stuck, and not whether its process answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fast.generation.test_loop import running_loop
from tests.support.async_tests import on_virtual_clock
from tests.support.loop_replica import LoopPeer, loop_replica
from tests.support.replicas import GatedReplica
from tests.support.scripted_engine import WAIT_S, ScriptedEngine, SteppedEngine, request
from torchtitan_rl.errors import LoopStalledError
from torchtitan_rl.generation.commands import Pause, Pull, ReadTokens, Resume
from torchtitan_rl.generation.engine import Pulse, StallWatch
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Completion

STALL_S = 120.0


class SlowPull(SteppedEngine):
    """Its swap of weights waits for permission, too."""

    def swap_weights(self, version: int) -> None:
        self.asked.release()
        assert self.permits.acquire(timeout=WAIT_S)
        super().swap_weights(version)


class Livelocked(ScriptedEngine):
    """Steps for ever and samples nothing."""

    def step(self) -> list[Completion]:
        return []


def test_only_a_busy_loop_without_progress_is_stuck() -> None:
    watch = StallWatch(10.0)
    assert not watch.is_stuck(Pulse(count=0, is_busy=False), 100.0)
    assert not watch.is_stuck(Pulse(count=0, is_busy=True), 200.0)
    assert not watch.is_stuck(Pulse(count=0, is_busy=True), 209.0)
    assert not watch.is_stuck(Pulse(count=1, is_busy=True), 210.0)
    assert not watch.is_stuck(Pulse(count=1, is_busy=False), 219.0)
    assert not watch.is_stuck(Pulse(count=1, is_busy=True), 230.0)
    assert watch.is_stuck(Pulse(count=1, is_busy=True), 240.0)


def replica_of(loop: EngineLoop) -> ConnectedReplica[LoopPeer]:
    return loop_replica("r0", loop, stall_timeout_s=STALL_S)


@asynccontextmanager
async def stepping(engine: SteppedEngine) -> AsyncIterator[None]:
    """Whatever happens, the engine's thread runs on when it is over."""
    try:
        yield
    finally:
        for _ in range(10_000):
            engine.permits.release()


@pytest.mark.parametrize("engine_type", [SteppedEngine, Livelocked])
@on_virtual_clock
async def test_a_stuck_engine_whose_process_answers_is_dead_and_its_requests_go_on_elsewhere(
    engine_type: type[ScriptedEngine],
) -> None:
    engine = engine_type()

    async def scenario(loop: EngineLoop) -> None:
        replicas = [replica_of(loop), GatedReplica("good")]
        router = GeneratorRouter(replicas, request_timeout_s=10_000.0)  # type: ignore[arg-type]
        now = asyncio.get_running_loop().time
        calls = [asyncio.create_task(router.generate(request(f"a{n}", 100))) for n in range(4)]
        if isinstance(engine, SteppedEngine):
            await asyncio.sleep(0.01)
            assert engine.asked.acquire(timeout=WAIT_S)
        while not loop.pulse().is_busy:
            await asyncio.sleep(0)
        stats = await router.stats()  # it answers
        assert set(stats) == {"r0", "good"}
        done = await asyncio.gather(*calls)
        assert STALL_S <= now() <= 1.5 * STALL_S
        assert {one.replica for one in done} == {"good"}
        assert router.states()["r0"] is Phase.DEAD
        assert "made no progress for 120 s" in str(router._pool.all[0].failure)
        assert isinstance(router._pool.all[0].failure, LoopStalledError)
        assert set(router.outstanding_tokens().values()) == {0}

    with running_loop(engine) as loop:
        if isinstance(engine, SteppedEngine):
            async with stepping(engine):
                await scenario(loop)
        else:
            await scenario(loop)


@on_virtual_clock
async def test_idle_paused_and_swapping_for_hours_is_not_stuck() -> None:
    engine = SlowPull()

    with running_loop(engine, stats_interval_s=0.0) as loop:
        async with stepping(engine):
            replica = replica_of(loop)
            call = asyncio.create_task(replica.generate(request("a", 10)))
            await asyncio.sleep(1)
            assert engine.asked.acquire(timeout=WAIT_S)
            for _ in range(3):  # slow, and getting on
                await asyncio.sleep(0.7 * STALL_S)
                engine.allow(1)
            pausing = loop.execute(Pause("keep"))
            engine.permits.release()
            pausing.result(WAIT_S)
            await asyncio.sleep(100 * STALL_S)
            pulling = loop.execute(Pull(1))
            assert engine.asked.acquire(timeout=WAIT_S)
            await asyncio.sleep(100 * STALL_S)
            engine.permits.release()
            pulling.result(WAIT_S)
            await asyncio.sleep(100 * STALL_S)
            assert not call.done()
            await replica.execute(ReadTokens())  # it is not lost
            loop.execute(Resume())
            for _ in range(100):
                engine.permits.release()
            assert len((await call).token_ids) == 10
            await asyncio.sleep(100 * STALL_S)
            await replica.execute(ReadTokens())
            await replica.close()
