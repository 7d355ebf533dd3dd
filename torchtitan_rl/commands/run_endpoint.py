"""The endpoint within a training run: agents' requests become turns of rollouts, other clients'
requests go to the router.

A run whose endpoint's process dies ends with that error, since its agents could only fail. It can
be resumed from its newest checkpoint and its journal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from torchtitan_rl.agents.env import AgentHost, AgentThread
from torchtitan_rl.agents.queue import ProblemQueue
from torchtitan_rl.aio import first_of
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.bridge import BridgeCounts, Endpoint
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.report import SessionEnding
from torchtitan_rl.serving.service import EndpointService
from torchtitan_rl.serving.sessions import Sessions

_T = TypeVar("_T")


class RunEndpoint:
    """A running endpoint; ``host`` is what agents need of it."""

    def __init__(self, host: AgentHost, sessions: Sessions, service: EndpointService) -> None:
        self.host = host
        self._sessions = sessions
        self._service = service
        self._before: dict[str, float] = {}

    async def background(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of ``work``, which needs the endpoint.

        Raises:
            EndpointLostError: its process is gone; ``work`` was cancelled.
        """
        result: _T = await first_of(work, self._service.run_until_lost())
        return result

    def take(self) -> dict[str, float]:
        """Metrics of the time since the last call, which starts the next period."""
        sessions = self._sessions.counts()
        totals = _request_totals(self._service.counts) | {
            f"endpoint/sessions/{ending.value}": sessions[f"sessions_{ending.value}"]
            for ending in SessionEnding
        }
        gauges = {"endpoint/sessions_open": float(sessions["sessions_open"])}
        if self.host.problems is not None:
            for name, number in self.host.problems.counts().items():
                (gauges if name.startswith("problems") else totals)[f"endpoint/{name}"] = number
        metrics = {name: total - self._before.get(name, 0.0) for name, total in totals.items()}
        self._before = totals
        return metrics | gauges


@asynccontextmanager
async def run_endpoint(
    endpoint: Endpoint, router: GeneratorRouter, config: EndpointConfig, keys: Keys
) -> AsyncIterator[RunEndpoint]:
    """Serve on an endpoint that has started, until the context is left."""
    async with AsyncExitStack() as stack:
        agents = stack.enter_context(AgentThread())
        sessions = Sessions(router, timeout_s=config.session_timeout_s)
        stack.push_async_callback(sessions.aclose)
        problems = ProblemQueue()
        service = await stack.enter_async_context(
            EndpointService(
                endpoint,
                router,
                sessions,
                interval_s=config.interval_s,
                handlers=problems.handlers(),
            )
        )
        host = AgentHost(
            base_url=endpoint.base_url,
            model=config.model_name,
            sessions=sessions,
            api_key=keys.api,
            loop=agents.loop,
            problems=problems,
        )
        yield RunEndpoint(host, sessions, service)


def _request_totals(counts: BridgeCounts) -> dict[str, float]:
    totals = {
        "endpoint/requests": counts.polled,
        "endpoint/completed": counts.completed,
        "endpoint/aborted": counts.aborted,
        "endpoint/missing_calls": counts.by_event["missing_calls"],
        "endpoint/broken_calls": counts.by_event["broken_calls"],
        **{f"endpoint/refused/{code}": n for code, n in counts.by_refusal.items()},
        **{f"endpoint/{event}": n for event, n in counts.by_event.items()},
    }
    return {name: float(total) for name, total in totals.items()}
