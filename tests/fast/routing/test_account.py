"""No sampled token is lost between replica and router, and the account says so exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fast.generation.test_loop import running_loop
from tests.support.async_tests import on_event_loop, on_virtual_clock
from tests.support.far_replica import FarReplica, connected
from tests.support.loop_replica import loop_replica
from tests.support.replicas import GatedReplica, handle, request, settle
from tests.support.scripted_engine import GivingUpEngine, scripted_token
from tests.support.virtual_clock import run_virtually
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

    def check_tokens(self) -> None:
        """Each token that is known is the one that was sampled there."""
        for asked, known, _ in self.heard:
            tokens = [*asked.prompt_token_ids, *known.token_ids]
            for index in range(len(asked.prompt_token_ids), len(tokens)):
                token, _ = scripted_token(tokens[:index], seed=None, version=0, vocab_size=40)
                assert token == tokens[index]
            assert len(known.logprobs) == len(known.versions) == len(known.token_ids)


Scenario = Callable[[list[FarReplica], GeneratorRouter, Ended], Awaitable[None]]


def virtually(scenario: Scenario, *, num_replicas: int = 2, **options: float) -> None:
    """Run it, then see that everything adds up and nothing is left."""

    async def run() -> None:
        replicas = [FarReplica(f"r{n}") for n in range(num_replicas)]
        ended = Ended()
        router = GeneratorRouter(connected(replicas), on_ended=ended, **options)  # type: ignore[arg-type]
        await scenario(replicas, router, ended)
        accounts = await router.account()
        for account in accounts.values():
            if account.is_live:
                assert (account.unaccounted, account.running) == (0, 0)
        assert ended.new_tokens == sum(account.received for account in accounts.values())
        ended.check_tokens()
        assert set(router.outstanding_tokens().values()) == {0}
        for replica in replicas:
            await replica.link.close()
        await settle()
        left = {
            task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()
        }
        assert left == set()

    run_virtually(run())


async def end_of(task: asyncio.Task[Completion]) -> Completion | BaseException:
    await asyncio.wait({task})
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() or task.result()


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("again", [None, 1])
def test_a_request_that_is_cancelled_at_any_moment_is_accounted_to_the_last_token(
    again: int | None,
) -> None:
    """``again``: a second cancel after so many iterations of the event loop."""
    kinds = set()
    # Every 0.1 s there is a step, and the end travels for 0.05 s: all phases of both.
    for at in range(0, 200, 7):

        async def scenario(
            replicas: list[FarReplica], router: GeneratorRouter, ended: Ended, at: int = at
        ) -> None:
            other = asyncio.create_task(router.generate(request("other", max_tokens=9)))
            task = asyncio.create_task(router.generate(request("a", max_tokens=5)))
            await asyncio.sleep((at // 8) * 0.05)
            await iterations(at % 8)
            task.cancel()
            if again is not None:
                await iterations(again)
                task.cancel()
            outcome = await end_of(task)
            await other
            kinds.add(type(outcome))
            if ended.names == ["other"]:
                assert at == 0  # it never began
            else:
                assert ended.names == ["a", "other"]
                (is_returned,) = [back for one, _, back in ended.heard if one.request_id == "a"]
                assert is_returned == isinstance(outcome, Completion)

        virtually(scenario)
    assert kinds == {asyncio.CancelledError, Completion}


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
