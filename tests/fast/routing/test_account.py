"""No sampled token is lost between replica and router, and the account says so exactly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tests.fast.generation.test_loop import running_loop
from tests.support.async_tests import on_event_loop, on_virtual_clock
from tests.support.far_replica import FarReplica, connected
from tests.support.loop_replica import loop_replica
from tests.support.replicas import GatedReplica, handle, request, settle
from tests.support.scripted_engine import GivingUpEngine
from torchtitan_rl.errors import (
    RequestGivenUpError,
)
from torchtitan_rl.generation.commands import AbortRequests, EngineCommand
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Completion, GenerationRequest


@dataclass
class Ended:
    """What the observer heard."""

    heard: list[tuple[GenerationRequest, Completion, bool]] = field(default_factory=list)

    def __call__(self, request: GenerationRequest, known: Completion, is_returned: bool) -> None:
        self.heard.append((request, known, is_returned))

    @property
    def names(self) -> list[str]:
        return sorted(request.request_id for request, _, _ in self.heard)

    @property
    def new_tokens(self) -> int:
        return sum(
            len(known.token_ids) - len(request.resume_from.token_ids if request.resume_from else ())
            for request, known, _ in self.heard
        )


@on_virtual_clock
async def test_an_end_that_is_lost_on_its_way_shows_in_the_account() -> None:
    replica = FarReplica("r")
    router = GeneratorRouter(connected([replica]))
    replica.dropped_ends = 1
    call = asyncio.create_task(router.generate(request("a", max_tokens=3)))
    await asyncio.sleep(5)
    account = (await router.account())["r"]
    assert (account.sampled, account.received, account.running) == (3, 0, 0)
    assert account.unaccounted == 3
    call.cancel()
    await asyncio.wait({call})
    assert router.states()["r"] is Phase.DEAD
    await replica.link.close()


@on_virtual_clock
async def test_a_replica_that_never_ends_a_cancelled_request_is_dead_and_the_cancel_ends() -> None:
    class Deaf(GatedReplica):
        async def answer(self, command: EngineCommand[Any]) -> Any:
            return None if isinstance(command, AbortRequests) else await super().answer(command)

    ended = Ended()
    router = GeneratorRouter([Deaf("r", is_open=False)], on_ended=ended)
    task = asyncio.create_task(router.generate(request("a")))
    await settle()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert ended.names == ["a"]
    assert router.states()["r"] is Phase.DEAD
    assert router.outstanding_tokens() == {"r": 0}


@on_event_loop
async def test_cancels_aborts_pulls_and_refusals_of_an_engine_loop_lose_no_token() -> None:
    with running_loop(GivingUpEngine(step_delay_s=0.0005, max_running=4)) as loop:
        ended = Ended()
        replica = loop_replica("r", loop)
        router = GeneratorRouter([replica], on_ended=ended)
        names = [f"{'bad' if n % 5 == 0 else 'a'}{n}" for n in range(40)]
        calls = [
            asyncio.create_task(router.generate(request(name, max_tokens=40))) for name in names
        ]
        for turn in range(1, 12):
            await asyncio.sleep(0.004)
            calls[3 * turn].cancel()
            await router.abort([names[3 * turn + 1]])
            if turn == 4:
                await router.sync_weights(handle(1), mode="hot_swap")
            if turn == 7:
                await router.pause("abort")
                await router.resume()
            account = (await router.account())["r"]
            assert account.unaccounted == 0
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        given_up = [one for one in outcomes if isinstance(one, RequestGivenUpError)]
        assert given_up
        assert all(one.completion.token_ids for one in given_up)
        account = (await router.account())["r"]
        assert (account.unaccounted, account.running) == (0, 0)
        assert account.sampled == ended.new_tokens == account.received
        assert ended.names == sorted(names)
        await replica.close()
