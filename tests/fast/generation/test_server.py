"""An engine loop at the other end of a connection: its batches, ends and refusals."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from tests.fast.generation.test_loop import running_loop
from tests.support.async_tests import on_event_loop, on_virtual_clock
from tests.support.loop_replica import LoopPeer
from tests.support.replicas import request
from tests.support.scripted_engine import ScriptedEngine
from torchtitan_rl.channel import Call, End
from torchtitan_rl.errors import InvalidRequestError, LoopClosedError, ReplicaError, StepFailedError
from torchtitan_rl.generation.commands import AbortRequests, Pause
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.generation.server import EngineServer, FromReplica, ToReplica
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.types import Completion, FinishReason, GenerationRequest


def called(item: GenerationRequest) -> ToReplica:
    return Call(call_id=item.request_id, payload=item)


class OverPickles(LoopPeer):
    """Its messages travel as bytes, as between processes."""

    def send(self, messages: tuple[ToReplica, ...]) -> None:
        super().send(pickle.loads(pickle.dumps(messages)))

    async def receive(self) -> tuple[FromReplica, ...]:
        return pickle.loads(pickle.dumps(await super().receive()))


def over_pickles(loop: EngineLoop, *, interval_s: float) -> ConnectedReplica[OverPickles]:
    server = EngineServer(loop, interval_s=interval_s)
    return ConnectedReplica(OverPickles("far", server, loop, None))


@pytest.mark.parametrize("interval_s", [0.0, 0.005])
@on_event_loop
async def test_a_loop_in_another_process_completes_streams_refuses_and_aborts(
    interval_s: float,
) -> None:
    engine = ScriptedEngine(step_delay_s=0.0002, max_model_len=10**6)
    with running_loop(engine, stream_interval_s=0.001, progress_interval_s=0.01) as loop:
        replica = over_pickles(loop, interval_s=interval_s)
        heard: dict[str, list[int]] = {}

        async def run(index: int) -> Completion:
            name = f"r{index}"
            hear = heard.setdefault(name, [])
            return await replica.generate(
                request(name, max_tokens=50),
                lambda one: hear.extend(one.token_ids),
                streams=index % 2 == 0,
            )

        with pytest.raises(InvalidRequestError):
            await replica.generate(request("long", max_tokens=10**7))
        cut = asyncio.create_task(replica.generate(request("cut", max_tokens=900_000)))
        completions = await asyncio.gather(*(run(index) for index in range(20)))
        await replica.execute(AbortRequests(("cut",)))
        assert (await cut).finish_reason is FinishReason.ABORT
        for one in completions:
            told = heard[one.request_id]
            assert one.finish_reason is FinishReason.LENGTH
            assert tuple(told) == one.token_ids[: len(told)]
        assert sum(len(told) for told in heard.values()) > 20
        await replica.close()


def test_a_loop_that_fails_or_is_closed_ends_its_calls_over_the_connection() -> None:
    async def ends_with(loop: EngineLoop, error: type[ReplicaError]) -> None:
        replica = over_pickles(loop, interval_s=0.0)
        calls = [replica.generate(request(name, max_tokens=100)) for name in "abc"]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [error] * 3
        with pytest.raises(error):
            await replica.generate(request("later"))
        await replica.close()

    with running_loop(ScriptedEngine(fail_at_step=5)) as failing:
        asyncio.run(ends_with(failing, StepFailedError))
    with running_loop(ScriptedEngine()) as closed:
        closed.close()
        asyncio.run(ends_with(closed, LoopClosedError))


@on_virtual_clock
async def test_an_end_leaves_at_once_whatever_the_interval() -> None:
    with running_loop(ScriptedEngine()) as loop:
        server = EngineServer(loop, interval_s=1.0, stall_timeout_s=240.0)
        clock = asyncio.get_running_loop()
        assert await server.take() == ()  # after a silence it says that it is there
        assert clock.time() == 30.0
        refused = called(request("x", prompt_len=600))

        async def refusals() -> list[float]:
            times = []
            for pause_s in (5.0, 0.0, 0.3, 0.0):
                await asyncio.sleep(pause_s)
                server.deliver([refused])
                (end,) = await server.take()
                assert isinstance(end, End)
                assert isinstance(end.error, InvalidRequestError)
                times.append(clock.time())
            return times

        assert await refusals() == pytest.approx([35.0, 35.0, 35.3, 35.3])
        loop.execute(Pause("keep")).result(60)
        server.deliver([called(request("frozen"))])
        assert await refusals() == pytest.approx([40.3, 40.3, 40.6, 40.6])
