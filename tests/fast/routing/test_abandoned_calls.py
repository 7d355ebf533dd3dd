"""Calls of a connected replica that are aborted or abandoned, and later ones with their ids."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tests.support.replicas import request, settle
from tests.support.wire import Wire, done, progress, virtually
from torchtitan_rl.channel import Abort, End
from torchtitan_rl.errors import InvalidRequestError, LoopClosedError, ReplicaError
from torchtitan_rl.generation.commands import ReadTokens
from torchtitan_rl.types import Progress


def test_an_abort_returns_when_the_replica_knows() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await asyncio.sleep(2)
        abort = asyncio.create_task(wire.replica.abort(("a", "unknown")))
        await settle()
        assert not abort.done()
        await abort
        assert wire.batches[-1] == (Abort(call_id="a"),)
        wire.tell(done("a"))
        await call
        await wire.replica.abort(("a",))  # ended: ignored
        assert len(wire.batches) == 2

    virtually(scenario)


def test_a_call_that_was_abandoned_before_it_left_never_leaves() -> None:
    async def scenario(wire: Wire) -> None:
        first = wire.call("first")
        await settle()
        abandoned = wire.call("a")
        await settle()
        abandoned.cancel()
        await asyncio.wait({abandoned})
        again = wire.call("a")
        await asyncio.sleep(2)
        assert wire.sent() == [["first"], ["a"]]
        wire.tell(done("first"), done("a"))
        await asyncio.gather(first, again)

    virtually(scenario)


def test_the_id_of_a_call_that_was_abandoned_is_taken_again_when_the_replica_has_ended_it() -> None:
    async def scenario(wire: Wire) -> None:
        heard: list[Progress] = []
        abandoned = wire.call("a", on_progress=heard.append)
        await asyncio.sleep(2)
        abandoned.cancel()
        await asyncio.wait({abandoned})
        again = wire.call("a")
        await asyncio.sleep(2)
        assert wire.sent() == [["a"]]
        wire.tell(progress("a"), done("a", count=5))
        await settle()
        assert not again.done()  # that was the end of the first
        assert heard == []
        assert wire.sent() == [["a"], ["a"]]
        wire.tell(done("a", count=9))
        assert len((await again).token_ids) == 9

    virtually(scenario)


def test_an_abort_that_has_not_left_does_not_meet_a_later_request_of_that_id() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await asyncio.sleep(2)
        blocker = wire.call("blocker")
        await settle()
        abort = asyncio.create_task(wire.replica.abort(("a",)))
        await settle()
        wire.tell(done("a"))
        await call
        again = wire.call("a")
        await abort
        assert not any(isinstance(one, Abort) for one in wire.batches[-1])
        wire.tell(done("a"), done("blocker"))
        await asyncio.gather(again, blocker)

    virtually(scenario)


@pytest.mark.parametrize("end", ["closed", "lost", "by an end"])
def test_a_loss_that_only_reaches_calls_whose_callers_are_gone_is_not_printed(end: str) -> None:
    complaints: list[dict[str, Any]] = []

    async def scenario(wire: Wire) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said))
        call, reading = wire.call("a"), asyncio.create_task(wire.replica.execute(ReadTokens()))
        await asyncio.sleep(2)
        for task in (call, reading):
            task.cancel()
        await asyncio.wait({call, reading})
        if end == "closed":
            await wire.replica.close()
        elif end == "lost":
            wire.news.put_nowait(ReplicaError("it died"))
        else:
            error = LoopClosedError("engine loop of far was closed")
            wire.tell(End(call_id="a", error=error))
        await settle()
        del call, reading, task
        gc.collect()

    virtually(scenario)
    gc.collect()
    assert complaints == []


def test_an_id_that_is_outstanding_is_refused() -> None:
    async def scenario(wire: Wire) -> None:
        call = wire.call("a")
        await settle()
        with pytest.raises(InvalidRequestError, match="still outstanding"):
            await wire.replica.generate(request("a"))
        wire.tell(done("a"))
        await call

    virtually(scenario)
