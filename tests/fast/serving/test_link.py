from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.endpoints import HEALTHY, completion, ends_of, request
from torchtitan_rl.channel import Abort, Call, CallId, End
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import ControllerLink, RequestEnd, ToController


def linked(**options: float) -> ControllerLink:
    """A link on the current event loop, in its time."""
    link = ControllerLink(**options)
    link.attach()
    return link


def end(request_id: str) -> RequestEnd:
    return End(call_id=request_id, result=completion(request_id))


def requested(messages: Iterable[ToController]) -> list[CallId]:
    """The requests among them."""
    return [one.call_id for one in messages if isinstance(one, Call)]


def aborted(messages: Iterable[ToController]) -> list[CallId]:
    return [one.call_id for one in messages if isinstance(one, Abort)]


@on_virtual_clock
async def test_a_command_without_an_answer_ends_at_its_deadline_and_says_what_it_was() -> None:
    link = linked()
    with pytest.raises(RefusedError, match="pause was not answered within 30 s") as raised:
        await link.command("pause", {"mode": "wait"}, timeout_s=30.0)
    assert raised.value.status == 504


@pytest.mark.parametrize("moment", ["waiting", "on its way", "answered", "refused"])
@on_virtual_clock
async def test_a_lease_without_its_caller_is_aborted_and_what_was_leased_is_given_back(
    moment: str,
) -> None:
    link = linked()
    asked = asyncio.create_task(link.command("problem.lease", {"wait_s": 60.0}))
    (command,) = await link.take()
    refusal = RefusedError(503, "cancelled", "aborted")
    if moment == "answered":
        link.deliver((End(call_id=command.call_id, result={"session_id": "s"}),))
        await asyncio.sleep(0)  # the answer is there, and its caller has not gone on yet
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled()
    if moment == "on its way":
        link.deliver((End(call_id=command.call_id, result={"session_id": "s"}),))
    elif moment == "refused":
        link.deliver((End(call_id=command.call_id, error=refusal),))
    await asyncio.sleep(1.0)
    abort, *returned = await link.take()
    assert abort == Abort(call_id=command.call_id)
    arguments = [call.payload.arguments for call in returned]
    given_back = {"session_id": "s", "outcome": "unused", "cause": ""}
    assert arguments == ([given_back] if moment in ("on its way", "answered") else [])


@on_virtual_clock
async def test_a_controller_that_delivers_no_more_fails_everything_that_waits_for_it() -> None:
    link = linked(lost_after_s=60.0)
    link.submit(request("running"))
    await link.take()
    link.deliver((HEALTHY,))
    link.submit(request("not polled"))
    asked = asyncio.create_task(link.command("versions", {}))
    await asyncio.sleep(59.0)
    assert link.status().is_healthy
    await asyncio.sleep(20.0)
    assert not link.status().is_healthy
    ends = await ends_of(link, 2)
    assert {item.error.status for item in ends.values() if item.error} == {503}
    with pytest.raises(RefusedError, match="does not answer"):
        await asked
    link.submit(request("later"))
    assert (await ends_of(link, 1))["later"].error is not None
    with pytest.raises(RefusedError, match="does not answer"):
        await link.command("resume", {})


def test_both_sides_may_live_on_threads_of_their_own() -> None:
    link, num_requests, is_attached = ControllerLink(), 300, threading.Event()
    polled: list[str] = []

    async def controller() -> None:
        while len(polled) < num_requests:
            batch = await link.take()
            names = [str(name) for name in requested(batch)]
            polled.extend(names)
            link.deliver(tuple(end(name) for name in names))

    def run_controller() -> None:
        is_attached.wait()
        asyncio.run(controller())

    async def server() -> dict[str, RequestEnd]:
        link.attach()
        is_attached.set()
        for index in range(num_requests):
            link.submit(request(f"r{index}"))
            if index % 7 == 0:
                await asyncio.sleep(0)
        return await ends_of(link, num_requests)

    thread = threading.Thread(target=run_controller)
    thread.start()
    ends = asyncio.run(asyncio.wait_for(server(), 60))
    thread.join(60)
    assert polled == [f"r{index}" for index in range(num_requests)]
    assert set(ends) == set(polled)
