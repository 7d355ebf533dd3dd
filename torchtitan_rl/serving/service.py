"""Runs an endpoint: its bridge, its status, the administrators' commands and a clean end.

Invariant: when the ``async with`` is left, no request of a client runs.

The system's state for ``/health`` and ``/metrics``: replicas, engines, requests, sessions.

Reading never waits: engines are asked in the background, and their last answers are reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan_rl.errors import EndpointLostError, GenerationError, TorchtitanRLError
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.bridge import BridgeCounts, EndpointBridge
from torchtitan_rl.serving.messages import (
    GAUGE_PREFIX,
    CommandName,
    Endpoint,
    Handler,
    SystemStatus,
    refused,
)
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import EngineStats

logger = logging.getLogger(__name__)


class EndpointService:
    """Connects a started endpoint with a router and sessions; it closes none of them.

    ``handlers`` replace those of the sessions and the router. ``grace_s``: time in which running
    requests may end when the service closes.
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
        self._grace_s = grace_s
        self._status = StatusReader(router, lambda: self.counts.gauges(), sessions.counts)
        self._bridge = EndpointBridge(
            endpoint,
            complete=sessions.complete,
            handlers={**_router_handlers(router), **sessions.handlers(), **(handlers or {})},
            status=self._status.read,
            interval_s=interval_s,
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def counts(self) -> BridgeCounts:
        return self._bridge.counts

    async def __aenter__(self) -> EndpointService:
        """Return once the endpoint has received the system's status.

        Raises:
            Exception: as `run_until_lost`.
        """
        self._tasks = [
            asyncio.create_task(self._bridge.run(), name="endpoint bridge"),
            asyncio.create_task(self._status.ask_engines(), name="endpoint status"),
        ]
        ready = asyncio.create_task(self._bridge.ready())
        try:
            await asyncio.wait([ready, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await self.run_until_lost()
        except BaseException:
            await self._stop()
            raise
        finally:
            ready.cancel()
        return self

    async def __aexit__(self, *error: object) -> None:
        bridge = self._tasks[0]
        try:
            if not (bridge.done() and _is_lost(bridge)):
                # Without a bridge no running request can end normally.
                await self._endpoint.drain(0.0 if bridge.done() else self._grace_s)
        except EndpointLostError as lost:
            logger.warning("the endpoint did not end cleanly: %s", lost)
        finally:
            await self._stop()

    async def run_until_lost(self) -> None:
        """Never returns.

        Raises:
            EndpointLostError: the endpoint's process is gone, or has failed.
            Exception: the error of a task of the service; no more requests are served.
        """
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()
        names = ", ".join(task.get_name() for task in done)
        raise EndpointLostError(f"a part of the service has ended: {names}")

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


def _router_handlers(router: GeneratorRouter) -> dict[CommandName, Handler]:
    """The handlers of administrators' commands, whose arguments `routes` has checked.

    In a training run the run's own resume, where it has one, also ends a pause of a client.
    """

    async def pause(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            await router.pause(arguments["mode"])
        except GenerationError as error:  # a `wait` may take minutes
            message = "generation was resumed before all replicas had stopped"
            raise refused(409, "resumed", message) from error
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


def _is_lost(bridge: asyncio.Task[None]) -> bool:
    return not bridge.cancelled() and isinstance(bridge.exception(), EndpointLostError)


_ASK_TIMEOUT_S = 30.0  # a dead process is known after ten

Counts = Callable[[], Mapping[str, float]]


class StatusReader:
    """``counts`` add gauges of their own, whose names get the common prefix."""

    def __init__(self, router: GeneratorRouter, *counts: Counts) -> None:
        self._router = router
        self._counts = counts
        self._engines: Mapping[str, EngineStats] = {}
        self._num_failed = 0

    async def ask_engines(self, interval_s: float = 1.0) -> None:
        """Ask until this is cancelled. A replica that does not answer is only counted; the router
        decides whether it is lost."""
        while True:
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    self._engines = await self._router.stats()
            except (TorchtitanRLError, TimeoutError):
                self._engines = {}
                self._num_failed += 1
            await asyncio.sleep(interval_s)

    def read(self) -> SystemStatus:
        gauges = {
            **self._replica_gauges(),
            **_engine_gauges(self._engines),
            "failed_engine_readings": float(self._num_failed),
        }
        for count in self._counts:
            gauges.update(count())
        cause = self._cause()
        return SystemStatus(
            is_healthy=not cause,
            cause=cause,
            newest_version=self._router.newest_version,
            gauges={GAUGE_PREFIX + name: float(value) for name, value in gauges.items()},
        )

    def _cause(self) -> str:
        try:
            self._router.require_unreserved()
        except GenerationError:
            return "no replica is left"  # the causes are in the controller's log, not for clients
        return ""

    def _replica_gauges(self) -> dict[str, float]:
        states = self._router.states()
        gauges = {
            "newest_version": float(self._router.newest_version),
            "replicas": float(len(states)),
            "replicas_live": float(sum(state != Phase.DEAD for state in states.values())),
        }
        for name, version in self._router.versions().items():
            gauges[_of_replica("replica_version", name)] = float(version)
        for name, tokens in self._router.outstanding_tokens().items():
            gauges[_of_replica("replica_outstanding_tokens", name)] = float(tokens)
        return gauges


def _engine_gauges(engines: Mapping[str, EngineStats]) -> dict[str, float]:
    gauges = {}
    for name, stats in engines.items():
        gauges[_of_replica("engine_running_requests", name)] = float(stats.running)
        gauges[_of_replica("engine_waiting_requests", name)] = float(stats.waiting)
        gauges[_of_replica("engine_kv_use", name)] = stats.kv_use
        gauges[_of_replica("engine_preemptions", name)] = float(stats.preemptions)
        gauges[_of_replica("engine_generated_tokens", name)] = float(stats.generated_tokens)
        gauges[_of_replica("engine_tokens_per_second", name)] = stats.tokens_per_second
        gauges[_of_replica("engine_steps", name)] = float(stats.steps)
    return gauges


def _of_replica(name: str, replica: str) -> str:
    return f'{name}{{replica="{replica}"}}'
