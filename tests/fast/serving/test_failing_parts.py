"""A part of the endpoint that ends by itself ends all of it, and every request has its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.endpoints import HEALTHY, Generator, LinkedEndpoint, ends_of, now, request
from tests.support.replicas import GatedReplica
from torchtitan_rl.channel import End
from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.bridge import EndpointBridge
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import ControllerLink, SystemStatus, ToController, ToEndpoint
from torchtitan_rl.serving.service import EndpointService
from torchtitan_rl.serving.sessions import Sessions


class Breaking(LinkedEndpoint):
    """A call raises, or is cancelled from within; sending only where a command was answered."""

    def __init__(self, link: ControllerLink, *, call: str, error: BaseException) -> None:
        super().__init__(link)
        self._call = call
        self._error = error

    async def receive(self) -> tuple[ToController, ...]:
        if self._call == "receive" and now() > 1.0:
            raise self._error
        return await super().receive()

    def send(self, messages: tuple[ToEndpoint, ...]) -> None:
        answers = any(isinstance(one, End) and isinstance(one.call_id, int) for one in messages)
        if self._call == "send" and now() > 1.0 and answers:
            raise self._error
        super().send(messages)


def broken_status(error: BaseException) -> Callable[[], SystemStatus]:
    def read() -> SystemStatus:
        if now() > 1.0:
            raise error
        return HEALTHY

    return read


async def nothing(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


@pytest.mark.parametrize("error", [ZeroDivisionError("a error"), asyncio.CancelledError()])
@pytest.mark.parametrize("part", ["receive", "send", "status"])
@on_virtual_clock
async def test_a_loop_of_the_bridge_that_ends_is_its_error_and_what_runs_is_refused(
    part: str, error: BaseException
) -> None:
    link = ControllerLink()
    link.attach()
    generator = Generator(step_s=1000.0)
    bridge = EndpointBridge(
        Breaking(link, call=part, error=error),
        complete=generator.complete,
        handlers={"versions": nothing},
        status=broken_status(error) if part == "status" else lambda: HEALTHY,
        interval_s=0.05,
    )
    running = asyncio.create_task(bridge.run())
    link.submit(request("a"))
    await asyncio.sleep(1.5)
    asking = asyncio.create_task(link.command("versions", {}))
    with pytest.raises(type(error)):
        await running
    refusal = (await ends_of(link, 1))["a"].error
    assert refusal is not None
    assert refusal.code == "shutting_down"
    assert generator.cancelled == ["a"]
    assert not generator.running
    link.close()  # as an endpoint that is drained does
    (answer,) = await asyncio.gather(asking, return_exceptions=True)
    assert answer == {} or isinstance(answer, RefusedError)


@on_virtual_clock
async def test_a_request_that_was_cancelled_from_within_is_not_told_of_a_shutdown() -> None:
    link = ControllerLink()
    link.attach()

    async def complete(request: Any, on_progress: Any = None) -> Any:
        raise asyncio.CancelledError

    bridge = EndpointBridge(
        LinkedEndpoint(link),
        complete=complete,
        handlers={},
        status=lambda: HEALTHY,
        interval_s=0.05,
    )
    running = asyncio.create_task(bridge.run())
    link.submit(request("a"))
    refusal = (await ends_of(link, 1))["a"].error
    assert refusal is not None
    assert (refusal.status, refusal.code) == (503, "cancelled")
    running.cancel()
    await asyncio.wait([running])
    link.close()


def served(endpoint: LinkedEndpoint) -> tuple[EndpointService, GatedReplica]:
    """A service over one replica that generates when its gate is open."""
    replica = GatedReplica("replica0")
    router = GeneratorRouter([replica], request_timeout_s=600.0)
    return EndpointService(endpoint, router, Sessions(router), interval_s=0.02), replica


@on_virtual_clock
async def test_a_bridge_that_was_cancelled_from_within_is_its_loss() -> None:
    link = ControllerLink()
    link.attach()
    endpoint = LinkedEndpoint(link)
    service, replica = served(endpoint)
    replica.gate.clear()
    async with service:
        link.submit(request("a"))
        await asyncio.sleep(1.0)
        service._running.cancel()
        with pytest.raises(EndpointLostError, match="was cancelled"):
            await service.run_until_lost()
    assert len(endpoint.drains) == 1
    assert replica.running == 0
    refusal = (await ends_of(link, 1))["a"].error
    assert refusal is not None
    link.close()


@on_virtual_clock
async def test_an_endpoint_that_fails_answers_all_its_clients_and_ends_the_service() -> None:
    link = ControllerLink()
    link.attach()
    service, replica = served(LinkedEndpoint(link))
    replica.gate.clear()
    async with service:
        link.submit(request("a"))
        await asyncio.sleep(1.0)
        began = now()
        waiting = asyncio.create_task(link.command("versions", {}))
        await asyncio.sleep(0)
        link.fail("outputs are no longer taken")
        link.submit(request("b"))
        ends = await ends_of(link, 2)
        assert {end.error.code for end in ends.values() if end.error} == {"endpoint_failed"}
        with pytest.raises(RefusedError, match="has failed"):
            await waiting
        with pytest.raises(RefusedError, match="has failed"):
            await link.command("versions", {})
        with pytest.raises(EndpointLostError, match="outputs are no longer taken"):
            await service.run_until_lost()
        assert now() == began  # by the receipt that waited
        assert not link.status().is_healthy
        await asyncio.sleep(100.0)
        assert not link.status().is_healthy  # a status brings no failed endpoint back
    assert replica.running == 0
    link.close()


@on_virtual_clock
async def test_a_delivery_that_cannot_be_taken_fails_the_endpoint_instead_of_being_lost() -> None:
    link = ControllerLink()
    link.attach()
    link.submit(request("a"))
    link.deliver((None,))  # type: ignore[arg-type]
    await asyncio.sleep(0.1)
    assert not link.status().is_healthy
    with pytest.raises(EndpointLostError, match="could not be taken"):
        await link.take()
