"""Requests under which engines fail."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from tests.fast.generation.test_loop import running_loop
from tests.support.async_tests import on_event_loop, on_virtual_clock
from tests.support.loop_replica import loop_replica
from tests.support.replicas import GatedReplica, handle, request
from tests.support.scripted_engine import ScriptedEngine
from torchtitan_rl.errors import GenerationError, ReplicaError, StepFailedError
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress


class Poisoned(GatedReplica):
    """Dies of requests that are called "poison"."""

    death: type[ReplicaError] = StepFailedError

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        if request.request_id.startswith("poison"):
            raise self.death(f"{self.name} failed")
        return await super().generate(request)


class Killed(Poisoned):
    death = ReplicaError


@on_virtual_clock
async def test_trap_11_a_request_under_which_engines_fail_does_not_reach_all_of_them() -> None:
    router = GeneratorRouter([Poisoned(f"r{n}") for n in range(3)])
    with pytest.raises(GenerationError, match="2 engines failed while they had it"):
        await router.generate(request("poison"))
    assert sorted(router.states().values()) == [Phase.DEAD] * 2 + [Phase.SERVING]
    assert (await router.generate(request("a"))).replica == "r2"


@on_virtual_clock
async def test_a_request_goes_on_whatever_number_of_processes_were_killed_under_it() -> None:
    router = GeneratorRouter([*(Killed(f"r{n}") for n in range(4)), GatedReplica("good")])
    assert (await router.generate(request("poison"))).replica == "good"


@on_event_loop
async def test_a_request_is_not_blamed_for_weight_swaps_that_fail_under_it() -> None:
    engines = [ScriptedEngine(step_delay_s=0.001, fail_at_pull=version) for version in (1, 2, 3)]
    with ExitStack() as loops:
        replicas = [
            loop_replica(f"r{index}", loops.enter_context(running_loop(engine, name=f"r{index}")))
            for index, engine in enumerate(engines)
        ]
        router = GeneratorRouter(replicas)
        call = asyncio.create_task(router.generate(request("a", max_tokens=400)))
        for version, engine in ((1, engines[0]), (2, engines[1])):
            while not engine.num_unfinished():
                await asyncio.sleep(0.001)
            await router.sync_weights(handle(version), mode="hot_swap")
        done = await call
        assert (done.replica, len(done.token_ids)) == ("r2", 400)
        assert list(router.states().values()) == [Phase.DEAD, Phase.DEAD, Phase.SERVING]
        await router.close()
