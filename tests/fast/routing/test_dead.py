"""What a replica has leaves it at once when it is found dead, whatever finds it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.far_replica import FarReplica, connected
from tests.support.replicas import handle, request
from tests.support.scripted import ScriptedEngine
from torchtitan_rl.generation.commands import ReadStats, ReadTokens
from torchtitan_rl.routing.replica import ReplicaState
from torchtitan_rl.routing.router import GeneratorRouter

Finds = Callable[[GeneratorRouter, FarReplica], Awaitable[object]]


async def pause(router: GeneratorRouter, replica: FarReplica) -> None:
    await router.pause("abort")  # its time-out is that of a request
    await router.resume()


async def pull(router: GeneratorRouter, replica: FarReplica) -> None:
    await router.sync_weights(handle(1), mode="hot_swap")


async def stats(router: GeneratorRouter, replica: FarReplica) -> None:
    replica.loses(ReadStats())
    await router.stats()


async def reading(router: GeneratorRouter, replica: FarReplica) -> None:
    replica.loses(ReadTokens())
    await router.account()


async def abort(router: GeneratorRouter, replica: FarReplica) -> None:
    replica.freeze()
    (name,) = replica.engine.generated_lengths().keys() & {"victim", "victim2"}
    await router.abort([name])


@pytest.mark.parametrize("finds", [pause, pull, stats, reading, abort])
@on_virtual_clock
async def test_requests_on_a_replica_that_is_found_dead_go_on_elsewhere_at_once_from_their_tokens(
    finds: Finds,
) -> None:
    replicas = [FarReplica(f"r{n}", engine=ScriptedEngine()) for n in range(2)]
    router = GeneratorRouter(connected(replicas), request_timeout_s=500.0, sync_timeout_s=20.0)
    # Two on each; in the case of `abort` one of them is the one that is aborted.
    names = ["victim", "victim2", "a", "b"]
    calls = [asyncio.create_task(router.generate(request(n, max_tokens=30))) for n in names]
    await asyncio.sleep(0.65)
    sick = replicas[0]
    known = max(sick.engine.generated_lengths().values())
    assert known > 2
    sick.hang()
    await finds(router, sick)
    found_s = asyncio.get_running_loop().time()
    assert router.states()["r0"] is ReplicaState.DEAD
    await asyncio.sleep(5)
    done = [call.result() for call in calls]  # 30 steps of 0.1 s
    assert asyncio.get_running_loop().time() < found_s + 6
    assert {one.replica for one in done if len(one.token_ids) == 30} == {"r1"}
    went_on = sum(admitted for admitted in replicas[1].resumed)
    assert went_on >= (1 if finds is abort else 2)  # from their tokens
    assert router.outstanding_tokens() == {"r0": 0, "r1": 0}
    for replica in replicas:
        await replica.link.close()


@on_virtual_clock
async def test_a_pause_does_not_wait_for_a_replica_that_dies_meanwhile() -> None:
    replicas = [FarReplica(f"r{n}", engine=ScriptedEngine()) for n in range(2)]
    router = GeneratorRouter(connected(replicas))
    call = asyncio.create_task(router.generate(request("a", max_tokens=30)))
    await asyncio.sleep(0.5)
    replicas[0].hang()
    pausing = asyncio.create_task(router.pause("abort"))
    await asyncio.sleep(3)
    assert not pausing.done()
    replicas[0].kill()
    await pausing
    assert asyncio.get_running_loop().time() < 5
    await router.resume()
    assert len((await call).token_ids) == 30
    for replica in replicas:
        await replica.link.close()
