"""Pauses and sleeps of the router: what they hold up, and which time counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.replicas import GatedReplica, handle, request, settle
from torchtitan_rl.errors import GenerationTimeoutError, ReplicaError
from torchtitan_rl.generation.commands import EngineCommand
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter


@pytest.mark.parametrize(
    ("stop", "is_running"), [("keep", True), ("abort", False), ("sleep", True)]
)
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
