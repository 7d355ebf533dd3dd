"""The router: placement, losses, deadlines and load."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.replicas import GatedReplica, handle, request, settle
from torchtitan_rl.errors import (
    DeadlineError,
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
    ReplicaError,
    WeightSyncError,
)
from torchtitan_rl.generation.commands import EngineCommand
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter


@on_virtual_clock
async def test_turns_of_a_session_go_to_one_replica():
    replicas = [GatedReplica(f"r{i}") for i in range(3)]
    router = GeneratorRouter(replicas)
    for turn in range(4):
        for session in "abc":
            await router.generate(request(f"{session}{turn}", session=session))
    homes = {session: [r.name for r in replicas if f"{session}0" in r.served] for session in "abc"}
    for session, (home,) in homes.items():
        served = next(r.served for r in replicas if r.name == home)
        assert all(f"{session}{turn}" in served for turn in range(4))


@on_virtual_clock
async def test_new_sessions_with_one_prompt_go_to_one_replica():
    replicas = [GatedReplica(f"r{i}", is_open=False) for i in range(2)]
    router = GeneratorRouter(replicas)
    names = [f"{prompt}{number}" for number in range(4) for prompt in "abcd"]
    tasks = [
        asyncio.create_task(router.generate(request(name, session=name, prompt=name[0])))
        for name in names
    ]
    await settle()
    homes = {name: replica.name for replica in replicas for name in replica.served}
    assert [{homes[f"{prompt}{n}"] for n in range(4)} for prompt in "abcd"] == [
        {"r0"},
        {"r1"},
        {"r0"},
        {"r1"},
    ]
    for replica in replicas:
        replica.gate.set()
    await asyncio.gather(*tasks)


@on_virtual_clock
async def test_with_no_replica_left_requests_fail_and_say_why():
    replica = GatedReplica("only")
    replica.is_dead = True
    router = GeneratorRouter([replica])
    for _ in range(2):
        with pytest.raises(GenerationError, match="only: ReplicaError: only is dead"):
            await router.generate(request("a"))


@on_virtual_clock
async def test_a_request_past_its_deadline_is_aborted_on_its_replica():
    replica = GatedReplica("slow", is_open=False)
    router = GeneratorRouter([replica], request_timeout_s=0.01)
    with pytest.raises(GenerationTimeoutError, match="a was not completed by replica slow"):
        await router.generate(request("a"))
    assert replica.aborted == ["a"]
    assert router.outstanding_tokens() == {"slow": 0}


@on_virtual_clock
async def test_trap_12_load_is_released_when_the_caller_is_cancelled():
    replica = GatedReplica("r", is_open=False)
    router = GeneratorRouter([replica])
    task = asyncio.create_task(router.generate(request("a")))
    await settle()
    assert router.outstanding_tokens()["r"] == 8
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.outstanding_tokens()["r"] == 0
    assert replica.aborted == ["a"]


@on_virtual_clock
async def test_close_fails_requests_and_syncs_that_wait_for_a_replica():
    replica = GatedReplica("r", is_open=False)
    router = GeneratorRouter([replica])
    running = asyncio.create_task(router.generate(request("old")))
    await settle()
    sync = asyncio.create_task(router.sync_weights(handle(1), mode="drain"))
    await settle()
    waiting = asyncio.create_task(router.generate(request("new")))
    await settle()
    await router.close()
    with pytest.raises(GenerationError, match="router is closed"):
        await waiting
    with pytest.raises(WeightSyncError, match="router is closed"):
        await sync
    replica.gate.set()
    await running
    assert replica.is_closed
    assert replica.running_at_pull == []


@on_virtual_clock
async def test_trap_10_an_id_that_is_still_running_is_refused_and_not_run_twice():
    replicas = [GatedReplica(f"r{i}", is_open=False) for i in range(2)]
    router = GeneratorRouter(replicas)
    first = asyncio.create_task(router.generate(request("a")))
    await settle()
    with pytest.raises(InvalidRequestError, match="still outstanding"):
        await router.generate(request("a"))
    for replica in replicas:
        replica.gate.set()
    await first
    assert (await router.generate(request("a"))).request_id == "a"


@on_virtual_clock
async def test_trap_11_a_replica_whose_reading_fails_is_dead_and_the_others_are_read():
    class Unreadable(GatedReplica):
        async def answer(self, command: EngineCommand[Any]) -> Any:
            raise ReplicaError("it died while idle")

    class Slow(GatedReplica):
        async def answer(self, command: EngineCommand[Any]) -> Any:
            raise DeadlineError("busy")

    router = GeneratorRouter([Unreadable("dead"), Slow("slow"), GatedReplica("well")])
    assert set(await router.stats()) == {"well"}
    assert router.states() == {
        "dead": Phase.DEAD,
        "slow": Phase.SERVING,
        "well": Phase.SERVING,
    }
