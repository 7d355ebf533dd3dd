"""Runs an endpoint in the controller: its bridge, the system's status, the administrators' commands
and a clean shutdown.

Reading the status never waits: engines are polled in the background, and the status has their last
answers.

Invariant: after the ``async with`` block no client's request runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.aio import cancel_all, retrieve
from torchtitan_rl.errors import EndpointLostError, GenerationError, TorchtitanRLError
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.bridge import BridgeCounts, Endpoint, EndpointBridge
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import GAUGE_PREFIX, CommandName, Handler, SystemStatus
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import EngineStats

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 30.0  # a dead process is noticed after ten seconds
_ASK_INTERVAL_S = 1.0


class EndpointService:
    """Connects a started endpoint with a router and sessions; the service closes none of them.

    ``handlers`` take precedence over the handlers of the sessions and the router. When the service
    closes, running requests may end within ``grace_s``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        router: GeneratorRouter,
        sessions: Sessions,
        *,
        interval_s: float,
        handlers: Mapping[CommandName, Handler] | None = None,
        grace_s: float = 5.0,
    ) -> None:
        self._endpoint = endpoint
        self._router = router
        self._sessions = sessions
        self._grace_s = grace_s
        self._engines: Mapping[str, EngineStats] = {}
        self._num_failed_readings = 0
        self._bridge = EndpointBridge(
            endpoint,
            complete=sessions.complete,
            handlers={**_router_handlers(router), **sessions.handlers(), **(handlers or {})},
            status=self._status,
            interval_s=interval_s,
        )
        self._running: asyncio.Task[None]

    @property
    def counts(self) -> BridgeCounts:
        return self._bridge.counts

    async def __aenter__(self) -> EndpointService:
        """Return once the endpoint has received the system's status.

        Raises:
            Exception: the errors of `run_until_lost`.
        """
        self._running = asyncio.create_task(self._run(), name="endpoint bridge")
        self._running.add_done_callback(retrieve)
        ready = asyncio.create_task(self._bridge.ready())
        try:
            await asyncio.wait([ready, self._running], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await self.run_until_lost()
        except BaseException:
            await cancel_all([self._running])
            raise
        finally:
            ready.cancel()
        return self

    async def __aexit__(self, *error: object) -> None:
        running = self._running
        try:
            if not running.done():
                await self._endpoint.drain(self._grace_s)
            elif running.cancelled() or not isinstance(running.exception(), EndpointLostError):
                await self._endpoint.drain(0.0)  # no running request can end normally
        except EndpointLostError as lost:
            logger.warning("the endpoint did not end cleanly: %s", lost)
        finally:
            await cancel_all([running])

    async def _run(self) -> None:
        await self._bridge.run(self._ask_engines())

    async def run_until_lost(self) -> None:
        """Wait for a failure of the service; never returns.

        Raises:
            EndpointLostError: the endpoint's process is gone, or has failed.
            Exception: a task of the service failed; no more requests are served.
        """
        await asyncio.wait([self._running])
        if self._running.cancelled():
            raise EndpointLostError("the service has ended: the endpoint's bridge was cancelled")
        self._running.result()

    async def _ask_engines(self) -> None:
        """Poll the engines until this call is cancelled. A replica that does not answer is only
        counted; the router decides whether the replica is lost."""
        while True:
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    self._engines = await self._router.stats()
            except (TorchtitanRLError, TimeoutError):
                self._engines = {}
                self._num_failed_readings += 1
            await asyncio.sleep(_ASK_INTERVAL_S)

    def _status(self) -> SystemStatus:
        router, cause = self._router, ""
        try:
            router.require_unreserved()
        except GenerationError:
            cause = "no replica is left"  # only the controller's log says why
        gauges = {
            **_replica_gauges(router),
            **_engine_gauges(self._engines),
            "failed_engine_readings": self._num_failed_readings,
            **self.counts.gauges(),
            **self._sessions.counts(),
        }
        return SystemStatus(
            is_healthy=not cause,
            cause=cause,
            newest_version=router.newest_version,
            gauges={GAUGE_PREFIX + name: float(value) for name, value in gauges.items()},
        )


def _router_handlers(router: GeneratorRouter) -> dict[CommandName, Handler]:
    """The handlers of administrators' commands, whose arguments `routes` has checked.

    A training run that pauses and resumes generation itself thereby also ends a client's pause.
    """

    async def pause(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            await router.pause(arguments["mode"])
        except GenerationError as error:  # waiting for running requests may take minutes
            message = "generation was resumed before all replicas had stopped"
            raise RefusedError(409, "resumed", message) from error
        return {"is_paused": True, "mode": arguments["mode"]}

    async def resume(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        await router.resume()
        return {"is_paused": False}

    async def versions(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "newest": router.newest_version,
            "replicas": router.versions(),
            "states": {name: state.value for name, state in router.states().items()},
        }

    return {"pause": pause, "resume": resume, "versions": versions}


def _replica_gauges(router: GeneratorRouter) -> dict[str, float]:
    states = router.states()
    gauges: dict[str, float] = {
        "newest_version": router.newest_version,
        "replicas": len(states),
        "replicas_live": sum(state != Phase.DEAD for state in states.values()),
    }
    for name, version in router.versions().items():
        gauges[_of_replica("replica_version", name)] = version
    for name, tokens in router.outstanding_tokens().items():
        gauges[_of_replica("replica_outstanding_tokens", name)] = tokens
    return gauges


_ENGINE_GAUGES = {
    "engine_running_requests": "running",
    "engine_waiting_requests": "waiting",
    "engine_kv_use": "kv_use",
    "engine_preemptions": "preemptions",
    "engine_generated_tokens": "generated_tokens",
    "engine_tokens_per_second": "tokens_per_second",
    "engine_steps": "steps",
}


def _engine_gauges(engines: Mapping[str, EngineStats]) -> dict[str, float]:
    return {
        _of_replica(gauge, name): getattr(stats, field)
        for name, stats in engines.items()
        for gauge, field in _ENGINE_GAUGES.items()
    }


def _of_replica(name: str, replica: str) -> str:
    return f'{name}{{replica="{replica}"}}'
