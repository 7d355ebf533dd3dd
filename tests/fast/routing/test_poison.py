"""Requests under which engines fail."""

from __future__ import annotations

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.replicas import GatedReplica, request
from torchtitan_rl.errors import GenerationError, LoopFailedError, ReplicaError
from torchtitan_rl.routing.replicas import Phase
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
