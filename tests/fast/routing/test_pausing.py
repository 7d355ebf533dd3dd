"""Pauses and sleeps of the router: what they hold up, and which time counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.far_replica import FarReplica, connected
from tests.support.replicas import GatedReplica, handle, request, settle
from torchtitan_rl.errors import GenerationTimeoutError, ReplicaError
from torchtitan_rl.generation.commands import EngineCommand, Pause, Resume
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter


@pytest.mark.parametrize("mode", ["abort", "wait"])
@on_virtual_clock
async def test_a_drain_does_not_wait_for_what_queues_at_a_replica_that_a_pause_emptied(mode):
    replica = GatedReplica("r", is_open=False)
    router = GeneratorRouter([replica])
    queued = asyncio.create_task(router.generate(request("a")))
    await settle()
    await router.pause(mode=mode)
    await router.sync_weights(handle(1), mode="drain")
    await router.resume()
    assert replica.stops == [Pause(mode), Resume()]
    replica.gate.set()
    await queued


@on_virtual_clock
async def test_a_drain_waits_while_requests_are_frozen():
    replica = GatedReplica("r", is_open=False)
    router = GeneratorRouter([replica], sync_timeout_s=0.01)
    running = asyncio.create_task(router.generate(request("a")))
    await settle()
    await router.pause(mode="keep")
    report = await router.sync_weights(handle(1), mode="drain", lag_timeout_s=0.05)
    assert (report.lagging, report.lost, replica.pulled) == (("r",), (), [])
    await router.resume()
    replica.gate.set()
    await running
    assert (await router.generate(request("b", min_version=1))).versions[0] == 1


@on_virtual_clock
async def test_a_replica_that_is_resumed_while_it_falls_asleep_is_not_taken_for_empty_later():
    router = GeneratorRouter(connected([FarReplica("r", latency_s=1.0)]))
    sleeping = asyncio.create_task(router.sleep())
    await asyncio.sleep(0.5)
    await router.resume()
    await sleeping
    (state,) = router._pool.all
    assert state.is_asleep
    assert not state.is_emptied
    await router.close()


@on_virtual_clock
async def test_a_pause_that_waits_waits_for_deadlines_and_loses_no_replica():
    router = GeneratorRouter(connected([FarReplica("r", step_s=1.0)]), request_timeout_s=10.0)
    call = asyncio.create_task(router.generate(request("a", max_tokens=400)))
    await asyncio.sleep(0.5)
    await router.pause(mode="wait")
    with pytest.raises(GenerationTimeoutError, match="within its 10 s"):
        await call
    assert router.states() == {"r": Phase.SERVING}
    await router.resume()
    await router.generate(request("b"))
    await router.close()


@pytest.mark.parametrize("stop", ["keep", "abort", "sleep"])
@pytest.mark.parametrize("is_running", [True, False])
@on_virtual_clock
async def test_a_deadline_counts_only_time_in_which_the_request_could_run(stop, is_running):
    replica = GatedReplica("r", is_open=False)
    router = GeneratorRouter([replica], request_timeout_s=10.0)
    if is_running:
        call = asyncio.create_task(router.generate(request("a")))
        await asyncio.sleep(4.0)
    await (router.sleep() if stop == "sleep" else router.pause(mode=stop))
    if not is_running:
        call = asyncio.create_task(router.generate(request("a")))
        await settle()
    await asyncio.sleep(5000.0)
    assert not call.done()
    if stop == "sleep":
        await router.wake_up()
        await router.sync_weights(handle(1), mode="hot_swap")
    await router.resume()
    resumed_s = asyncio.get_running_loop().time()
    with pytest.raises(GenerationTimeoutError, match=r"within its 10 s \(and 5000 s of pauses\)"):
        await call
    took_s = asyncio.get_running_loop().time() - resumed_s
    assert took_s == pytest.approx(6.0 if is_running else 10.0)


@on_virtual_clock
async def test_a_replica_that_cannot_pause_is_dead_and_the_others_go_on():
    stuck, good = GatedReplica("stuck"), GatedReplica("good")

    async def lost(command: EngineCommand[Any]) -> None:
        raise ReplicaError(f"stuck cannot {command}")

    stuck.answer = lost  # type: ignore[method-assign]
    router = GeneratorRouter([stuck, good])
    await router.pause(mode="keep")
    await router.resume()
    assert router.states()["stuck"] is Phase.DEAD
    assert (await router.generate(request("a"))).replica == "good"
