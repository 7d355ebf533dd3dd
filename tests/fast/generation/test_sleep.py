"""Replicas that give their device's memory away for a while: on every rank, and never stepped
before they have weights again."""

from __future__ import annotations

import asyncio

import pytest

from tests.fast.generation.test_loop import WAIT_S, SteppedEngine, request, running_loop
from tests.support.async_tests import on_event_loop
from tests.support.replicas import GatedReplica, handle, settle
from tests.support.replicas import request as routed
from tests.support.scripted_engine import ScriptedEngine
from tests.support.threaded_channel import make_threaded_channels
from torchtitan_rl.errors import LoopClosedError
from torchtitan_rl.generation.commands import (
    Pull,
    ReadTokens,
    Resume,
    Sleep,
    WakeUp,
)
from torchtitan_rl.generation.config import LoopConfig
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import FinishReason


def test_all_ranks_sleep_when_it_is_acknowledged_and_wake_up_together() -> None:
    engines = [ScriptedEngine(step_delay_s=0.001, max_model_len=10**6) for _ in range(3)]
    loops = [
        EngineLoop(engine, channel, is_leader=rank == 0, config=LoopConfig(heartbeat_s=0.01))
        for rank, (engine, channel) in enumerate(
            zip(engines, make_threaded_channels(3), strict=True)
        )
    ]
    leader = loops[0]
    for loop in loops:
        loop.start()
    cut = leader.submit(request("a", 900_000))
    while not leader.execute(ReadTokens()).result(WAIT_S).running_tokens:
        pass
    leader.execute(Sleep()).result(WAIT_S)
    assert cut.result(WAIT_S).finish_reason is FinishReason.ABORT
    assert [engine.is_asleep for engine in engines] == [True] * 3
    late = leader.submit(request("late", 3))
    leader.execute(WakeUp()).result(WAIT_S)
    assert [engine.is_asleep for engine in engines] == [False] * 3
    leader.execute(Pull(1)).result(WAIT_S)
    assert not late.done()
    leader.execute(Resume())
    assert set(late.result(WAIT_S).versions) == {1}
    leader.close()
    for loop in loops:
        assert loop.join(WAIT_S)
        assert loop.failure is None


def test_whatever_is_asked_in_between_nothing_is_stepped_before_weights_are_back() -> None:
    with running_loop(ScriptedEngine()) as loop:  # its step would raise
        loop.execute(Sleep()).result(WAIT_S)
        held = loop.submit(request("a", 3))
        ended = loop.submit(request("b", 3))
        loop.execute(Resume())
        pulled = loop.execute(Pull(1))  # waits for the wake-up
        loop.abort(("b",))
        assert ended.result(WAIT_S).token_ids == ()
        assert loop.execute(ReadTokens()).result(WAIT_S).sampled_tokens == 0
        assert not pulled.done()
        loop.execute(WakeUp()).result(WAIT_S)
        assert pulled.result(WAIT_S).version == 1
        assert set(held.result(WAIT_S).versions) == {1}


def test_sleeps_and_wake_ups_are_answered_one_by_one() -> None:
    engine, answered = SteppedEngine(), []
    commands = [Sleep(), WakeUp(), Sleep()]
    with running_loop(engine) as loop:
        loop.submit(request("a", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        futures = [loop.execute(command) for command in commands]
        for future, command in zip(futures, commands, strict=True):
            future.add_done_callback(lambda _, one=command: answered.append(one))
        engine.permits.release(100)
        for future in futures:
            future.result(WAIT_S)
    assert answered == commands


def test_trap_2_sleeps_end_with_the_loop() -> None:
    engine = SteppedEngine()
    with running_loop(engine) as loop:
        loop.submit(request("a", 50))
        assert engine.asked.acquire(timeout=WAIT_S)
        asleep = loop.execute(Sleep())
        loop._end(LoopClosedError("closed"))  # as `close` does first
        with pytest.raises(LoopClosedError):
            asleep.result(WAIT_S)
        with pytest.raises(LoopClosedError):
            loop.execute(WakeUp()).result(WAIT_S)
        engine.permits.release(100)


@on_event_loop
async def test_no_weights_are_swapped_while_replicas_fall_asleep_or_sleep() -> None:
    replica = GatedReplica("r")
    router = GeneratorRouter([replica])
    replica.pull_gate.clear()
    first = asyncio.create_task(router.sync_weights(handle(1), mode="hot_swap"))
    await settle()
    asleep = asyncio.create_task(router.sleep())
    await settle()
    assert replica.stops == []  # it finishes its swap first
    replica.pull_gate.set()
    await asyncio.gather(first, asleep)
    second = asyncio.create_task(router.sync_weights(handle(2), mode="hot_swap"))
    await settle()
    assert (replica.staged, replica.pulled) == ([1], [1])
    await router.wake_up()
    await second
    assert (replica.staged, replica.pulled) == ([1, 2], [1, 2])
    await router.resume()
    assert replica.stops == [Sleep(), WakeUp(), Resume()]


@on_event_loop
async def test_a_pinned_replica_gets_its_own_weights_back() -> None:
    replicas = [GatedReplica(f"r{n}") for n in range(2)]
    router = GeneratorRouter(replicas)
    await router.sync_weights(handle(1), mode="hot_swap")
    async with router.pin() as pin:
        await router.sleep()
        await router.wake_up()
        assert router.versions()[pin.replica] == 1
        await router.sync_weights(handle(2), mode="hot_swap")
        await router.resume()
        done = await pin.generate(routed("a"))
        assert set(done.versions) == {1}
    await settle()
    assert router.versions() == {"r0": 2, "r1": 2}
