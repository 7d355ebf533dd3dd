"""Requests under which engines fail."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.replicas import GatedReplica, request
from torchtitan_rl.errors import GenerationError, LoopFailedError, ReplicaError
from torchtitan_rl.routing.replica import ReplicaState
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress


class Poisoned(GatedReplica):
    """Dies of requests that are called "poison"."""

    death: type[ReplicaError] = LoopFailedError

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


def test_trap_11_a_request_under_which_engines_fail_does_not_reach_all_of_them() -> None:
    async def scenario() -> None:
        router = GeneratorRouter([Poisoned(f"r{n}") for n in range(3)])
        with pytest.raises(GenerationError, match="2 engines failed while they had it"):
            await router.generate(request("poison"))
        assert sorted(router.states().values()) == [ReplicaState.DEAD] * 2 + [ReplicaState.SERVING]
        assert (await router.generate(request("a"))).replica == "r2"

    asyncio.run(scenario())


def test_where_the_last_engine_fails_the_error_says_what_became_of_all() -> None:
    async def scenario() -> None:
        router = GeneratorRouter([Poisoned(f"r{n}") for n in range(2)])
        with pytest.raises(GenerationError, match=r"no replica is left: r0: .*; r1: "):
            await router.generate(request("poison"))

    asyncio.run(scenario())


def test_a_request_goes_on_whatever_number_of_processes_were_killed_under_it() -> None:
    async def scenario() -> None:
        router = GeneratorRouter([*(Killed(f"r{n}") for n in range(4)), GatedReplica("good")])
        assert (await router.generate(request("poison"))).replica == "good"

    asyncio.run(scenario())
