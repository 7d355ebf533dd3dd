"""Replicas that give their device's memory away for a while: on every rank, and never stepped
before they have weights again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fast.generation.test_loop import WAIT_S, SteppedEngine, request, running_loop
from tests.fast.generation.test_pause import undisturbed
from tests.support.async_tests import on_event_loop
from tests.support.loop_replica import loop_replica
from tests.support.replicas import GatedReplica, handle, settle
from tests.support.replicas import request as routed
from tests.support.scripted_engine import ScriptedEngine
from tests.support.threaded_channel import make_threaded_channels
from torchtitan_rl.errors import LoopClosedError, ReplicaError
from torchtitan_rl.generation.commands import (
    EngineCommand,
    Pause,
    Pull,
    ReadTokens,
    Resume,
    Sleep,
    WakeUp,
)
from torchtitan_rl.generation.decision import SoloChannel
from torchtitan_rl.generation.loop import EngineLoop, LoopConfig
from torchtitan_rl.routing.replicas import Phase
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


def test_a_woken_loop_that_was_resumed_waits_for_its_weights() -> None:
    with running_loop(ScriptedEngine()) as loop:
        loop.execute(Sleep()).result(WAIT_S)
        loop.execute(WakeUp()).result(WAIT_S)
        loop.execute(Resume())
        held = loop.submit(request("a", 3))
        loop.execute(Pause("keep")).result(WAIT_S)  # the loop has looked at it
        assert not held.done()
        loop.execute(Resume())
        loop.execute(Pull(0)).result(WAIT_S)
        assert len(held.result(WAIT_S).token_ids) == 3


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
async def test_requests_through_replicas_that_sleep_equal_undisturbed_ones() -> None:
    expected = undisturbed(200)

    loops = [
        EngineLoop(ScriptedEngine(step_delay_s=0.0005), SoloChannel(), is_leader=True)
        for _ in range(2)
    ]
    for loop in loops:
        loop.start()
    replicas = [loop_replica(f"r{n}", loop) for n, loop in enumerate(loops)]
    router = GeneratorRouter(replicas)
    await router.sync_weights(handle(0), mode="hot_swap")
    calls = [asyncio.create_task(router.generate(request(f"a{i}", 200))) for i in range(8)]
    for mode in ("hot_swap", "drain", "hot_swap"):
        await asyncio.sleep(0.01)
        await router.sleep()
        assert set(router.versions().values()) == {-1}
        await router.wake_up()
        # Weights of a version that they held before are pulled all the same.
        report = await router.sync_weights(handle(0), mode=mode)  # type: ignore[arg-type]
        assert len(report.pulls) == 2
        await router.resume()
    for done in await asyncio.gather(*calls):
        assert done.token_ids == expected
    await router.close()


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
async def test_a_drained_replica_that_falls_asleep_swaps_when_it_wakes_up() -> None:
    replica = GatedReplica("r", is_open=False)
    router = GeneratorRouter([replica])
    running = asyncio.create_task(router.generate(routed("a")))
    await settle()
    sync = asyncio.create_task(router.sync_weights(handle(1), mode="drain"))
    await settle()
    await router.sleep()
    await settle()
    assert replica.pulled == []
    await router.wake_up()
    await sync
    assert replica.pulled == [1]
    await router.resume()
    replica.gate.set()
    await running


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


@on_event_loop
async def test_a_pin_during_a_sleep_waits_until_a_replica_has_weights() -> None:
    router = GeneratorRouter([GatedReplica("r")])
    await router.sleep()
    pin = router.pin()
    entering = asyncio.create_task(pin.__aenter__())
    await settle()
    await router.wake_up()
    await settle()
    assert not entering.done()
    await router.sync_weights(handle(1), mode="hot_swap")
    assert (await entering).version == 1
    await pin.__aexit__(None, None, None)


@pytest.mark.parametrize("when", ["sleep", "wake_up"])
@on_event_loop
async def test_a_replica_that_fails_to_sleep_or_wake_up_is_dead(when: str) -> None:
    class Failing(GatedReplica):
        async def answer(self, command: EngineCommand[Any]) -> Any:
            if command == Sleep() and when == "sleep":
                raise ReplicaError("no memory to give")
            if command == WakeUp() and when == "wake_up":
                await asyncio.sleep(10)
            return await super().answer(command)

    router = GeneratorRouter([Failing("bad"), GatedReplica("good")], sync_timeout_s=0.01)
    await router.sleep()
    await router.wake_up()
    await router.sync_weights(handle(1), mode="hot_swap")
    await router.resume()
    assert router.states() == {"bad": Phase.DEAD, "good": Phase.SERVING}
    assert (await router.generate(routed("a"))).replica == "good"
