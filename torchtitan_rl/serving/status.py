"""The system's state for ``/health`` and ``/metrics``: replicas, engines, requests, sessions.

Reading never waits: engines are asked in the background, and their last answers are reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from torchtitan_rl.errors import GenerationError, TorchtitanRLError
from torchtitan_rl.routing.replica import ReplicaState
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.messages import GAUGE_PREFIX, SystemStatus
from torchtitan_rl.types import EngineStats

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
            "replicas_live": float(sum(state != ReplicaState.DEAD for state in states.values())),
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
