from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.endpoints import LinkedEndpoint, ends_of, request
from tests.support.replicas import GatedReplica, handle
from torchtitan_rl.commands.replicas import RunEndpoint, run_endpoint
from torchtitan_rl.errors import EndpointLostError, GenerationError
from torchtitan_rl.failures import Failure, Part
from torchtitan_rl.observability.sinks import check_names
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.link import ControllerLink
from torchtitan_rl.serving.service import EndpointService
from torchtitan_rl.serving.sessions import Sessions


@dataclass
class Parts:
    replicas: list[GatedReplica]
    router: GeneratorRouter
    link: ControllerLink
    endpoint: LinkedEndpoint
    sessions: Sessions
    failures: list[Failure] = field(default_factory=list)

    def service(self) -> EndpointService:
        return EndpointService(self.endpoint, self.router, self.sessions, interval_s=0.02)


def parts(replica: type[GatedReplica] = GatedReplica) -> Parts:
    """A router over two replicas, and an endpoint that nobody serves yet."""
    replicas = [replica("replica0"), replica("replica1")]
    router = GeneratorRouter(replicas, request_timeout_s=600.0)
    link = ControllerLink()
    link.attach()
    return Parts(replicas, router, link, LinkedEndpoint(link), Sessions(router))


@on_virtual_clock
async def test_a_service_that_has_begun_is_healthy_and_answers_requests_and_commands() -> None:
    system = parts()
    async with system.service() as service:
        assert system.link.status().is_healthy
        system.link.submit(request("a"))
        assert (await ends_of(system.link, 1))["a"].result is not None
        await system.router.sync_weights(handle(3), mode="hot_swap")
        versions = await system.link.command("versions", {})
        assert versions["newest"] == 3
        assert versions["replicas"] == {"replica0": 3, "replica1": 3}
        opened = await system.link.command("session.open", {"session_id": "s"})
        assert opened["session_id"] == "s"
        assert service.counts.completed == 1
    system.link.close()


@on_virtual_clock
async def test_the_status_follows_the_replicas_and_names_nothing_internal() -> None:
    system = parts()
    async with system.service():
        await asyncio.sleep(3.0)
        gauges = system.link.status().gauges
        assert gauges["torchtitan_rl_replicas_live"] == 2.0
        assert gauges['torchtitan_rl_engine_running_requests{replica="replica1"}'] == 0.0
        assert gauges["torchtitan_rl_sessions_open"] == 0.0
        system.replicas[0].is_dead = True
        await asyncio.sleep(3.0)
        status = system.link.status()
        assert status.is_healthy
        assert status.gauges["torchtitan_rl_replicas_live"] == 1.0
        system.replicas[1].is_dead = True
        await asyncio.sleep(3.0)
        status = system.link.status()
        assert not status.is_healthy
        assert status.cause == "no replica is left"
        with pytest.raises(GenerationError, match="replica1 is dead"):
            await system.router.wait_until_lost()
    system.link.close()


@on_virtual_clock
async def test_a_service_that_ends_gives_time_and_leaves_no_request() -> None:
    system = parts()
    for replica in system.replicas:
        replica.gate.clear()
    async with system.service():
        system.link.submit(request("a"))
        await asyncio.sleep(1.0)
        assert system.replicas[0].running + system.replicas[1].running == 1
    assert system.endpoint.drains == [5.0]
    assert system.replicas[0].running + system.replicas[1].running == 0
    assert len(system.replicas[0].aborted + system.replicas[1].aborted) == 1
    system.link.close()


@contextlib.asynccontextmanager
async def in_a_run(system: Parts) -> AsyncIterator[RunEndpoint]:
    config, keys = EndpointConfig(model_name="m", max_restarts=1), Keys(api="key")
    async with run_endpoint(
        system.endpoint,
        system.router,
        config,
        keys,
        say=lambda line: None,
        on_failure=system.failures.append,
    ) as endpoint:
        yield endpoint
    system.link.close()


@on_virtual_clock
async def test_a_run_ends_as_its_work_does_or_by_the_loss_of_its_endpoint() -> None:
    system = parts()
    ended: list[str] = []

    async def work(seconds: float, error: Exception | None = None) -> int:
        try:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
            return 5
        finally:
            ended.append(f"after {seconds:.0f}")

    async with in_a_run(system) as endpoint:
        assert await endpoint.background(work(1.0)) == 5
        with pytest.raises(ZeroDivisionError):
            await endpoint.background(work(2.0, ZeroDivisionError()))
        running = asyncio.create_task(endpoint.background(work(1000.0)))
        await asyncio.sleep(1.0)
        system.endpoint.lose()
        with pytest.raises(EndpointLostError, match=r"can be started; .*after 1 restart"):
            await running
        (failure,) = system.failures
        assert (failure.part, failure.given_up) == (Part.ENDPOINT, "after 1 restarts in a row")
        assert ended == ["after 1", "after 2", "after 1000"]


@on_virtual_clock
async def test_the_metrics_of_a_step_are_those_since_the_step_before() -> None:
    system = parts()
    async with in_a_run(system) as endpoint:
        for name in ("a", "b"):
            system.link.submit(request(name))
        await ends_of(system.link, 2)
        await system.link.command("session.open", {"session_id": "s"})
        first = endpoint.take()
        await system.link.command("session.close", {"session_id": "s", "reward": 1.0})
        system.link.count("missing_calls")
        system.link.count("unconstrained/tool_choice")
        system.link.submit(request("c"))
        await ends_of(system.link, 1)
        second = endpoint.take()
        assert (first["endpoint/requests"], second["endpoint/requests"]) == (2.0, 1.0)
        assert (first["endpoint/sessions_open"], second["endpoint/sessions_open"]) == (1.0, 0.0)
        assert (first["endpoint/missing_calls"], second["endpoint/missing_calls"]) == (0.0, 1.0)
        assert second["endpoint/unconstrained/tool_choice"] == 1.0
        check_names(second)
        assert second["endpoint/sessions/rewarded"] == 1.0
        assert endpoint.take()["endpoint/sessions/rewarded"] == 0.0
