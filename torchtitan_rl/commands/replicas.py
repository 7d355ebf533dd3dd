"""Replicas without a trainer, for commands that only roll out (``eval`` and ``env check``); and the
endpoint of a run, which turns agents' requests into turns of rollouts and sends other clients'
requests to the router.

If the endpoint's process dies, it is started again. If that fails too often, the run ends with that
error, because all its agents would fail. The run can be resumed from its newest checkpoint and its
journal.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchtitan_rl.agents.env import AgentHost, AgentThread
from torchtitan_rl.agents.queue import ProblemQueue
from torchtitan_rl.agents.task import environment_factory
from torchtitan_rl.aio import first_of
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.serve import PreparedServe
from torchtitan_rl.failures import Failure
from torchtitan_rl.images import PREPROCESSOR_CONFIG
from torchtitan_rl.rollout.places import Places
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.run import EnvironmentFactory
from torchtitan_rl.routing.restarts import ReplicaRestarts
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.report import SessionEnding
from torchtitan_rl.serving.restarts import Endpoint, EndpointRestarts
from torchtitan_rl.serving.service import EndpointService, WeightLoader
from torchtitan_rl.serving.sessions import Sessions

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.run import ServeProcesses

_T = TypeVar("_T")

_SAME_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    PREPROCESSOR_CONFIG,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Replicas that serve a model, and what rollouts on them need."""

    config: RunConfig
    router: GeneratorRouter
    tokenizer: Any
    endpoint: RunEndpoint | None

    def environment(self) -> EnvironmentFactory:
        return environment_factory(
            self.config.task,
            tokenizer=self.tokenizer,
            limits=self.config.rollout,
            host=None if self.endpoint is None else self.endpoint.host,
        )

    def rollouter(self, *, places: Places | None = None) -> Rollouter:
        return Rollouter(
            generate=self.router.generate,
            environment=self.environment(),
            config=self.config.rollout,
            rubric=self.config.task.rubric(),
            active_time=self.router.active_time,
            num_replicas=lambda: self.router.num_unreserved,
            places=places,
        )

    async def with_endpoint(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work``, which needs the endpoint if there is one, and return its result. Raises
        EndpointLostError, with ``work`` cancelled."""
        return await (work if self.endpoint is None else self.endpoint.background(work))

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work``, which needs the replicas, and return its result. Raises GenerationError if
        no replica is left, or EndpointLostError, with ``work`` cancelled."""
        result: _T = await self.with_endpoint(first_of(work, self.router.wait_until_lost()))
        return result


class Replicas:
    """Serves one model at a time. Call `use` any number of times while the ``async with`` is
    open."""

    def __init__(
        self,
        prepared: PreparedRun,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        self._prepared = prepared
        self._say = say
        self._stack = AsyncExitStack()
        self._current: tuple[Generation, WeightLoader] | None = None
        self._started = self._serving = Path()  # the first model of the processes; the current one

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def use(self, directory: Path) -> Generation:
        """Serve a model. If it differs from the previous model only in its weights, the weights are
        loaded into the same engines; otherwise new processes are started.

        Raises:
            EndpointLostError, ReplicaError, DeadlineError: the processes did not start.
        """
        if self._current is not None:
            generation, loader = self._current
            if directory == self._serving:
                return generation
            if _same_files(self._started, directory):
                with suppress(RefusedError):  # tensors of other shapes, or they cannot be loaded
                    await loader.load(str(directory))
                    self._serving = directory
                    return generation
        await self._stack.aclose()
        self._current = await self._stack.enter_async_context(
            _generation(self._prepared, directory, self._say)
        )
        self._started = self._serving = directory
        return self._current[0]


@asynccontextmanager
async def served(
    prepared: PreparedRun | PreparedServe,
    *,
    name: str,
    request_timeout_s: float,
    sync_timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> AsyncIterator[tuple[ServeProcesses, GeneratorRouter, WeightLoader]]:
    """Start the processes of a plan without a trainer. Yields the processes, a router over the
    replicas, and a loader for other weights. Lost replicas are started again, except those that
    serve tenants. ``name`` is part of the names of their shared memory."""
    from torchtitan_rl.backends.monarch.run import serve_processes  # seconds
    from torchtitan_rl.weights.shm import SharedMemoryPublisher

    async with serve_processes(prepared) as processes:
        router = GeneratorRouter(
            processes.replicas, request_timeout_s=request_timeout_s, sync_timeout_s=sync_timeout_s
        )
        publisher = SharedMemoryPublisher(name, prepared.config.log_dir.absolute())
        # A new engine would have the newest tenant's adapter alone.
        serves_tenants = isinstance(prepared, PreparedServe) and prepared.slots is not None
        restarts = ReplicaRestarts(
            router,
            processes.restart,
            max_restarts=0 if serves_tenants else prepared.config.generator.max_restarts,
            say=say,
            on_failure=lambda failure: say(failure.describe()),
        )
        try:
            async with restarts:
                yield processes, router, WeightLoader(router, publisher, prepared.policy_dir)
        finally:
            publisher.close()


@asynccontextmanager
async def _generation(
    prepared: PreparedRun, directory: Path, say: Callable[[str], None]
) -> AsyncIterator[tuple[Generation, WeightLoader]]:
    config = prepared.config
    tokenizer = await asyncio.to_thread(load_tokenizer, directory)
    async with AsyncExitStack() as stack:
        processes, router, loader = await stack.enter_async_context(
            served(
                replace(prepared, policy_dir=directory),
                name=config.name,
                request_timeout_s=config.request_timeout_s,
                sync_timeout_s=config.weight_sync.timeout_s,
                say=say,
            )
        )
        endpoint = None
        if processes.endpoint is not None:
            endpoint = await stack.enter_async_context(
                run_endpoint(
                    processes.endpoint,
                    router,
                    config.endpoint,
                    prepared.keys,
                    say=say,
                    on_failure=lambda failure: say(failure.describe()),
                )
            )
        generation = Generation(
            config=config, router=router, tokenizer=tokenizer, endpoint=endpoint
        )
        yield generation, loader


def _same_files(one: Path, other: Path) -> bool:
    """Whether two models have equal tokenizers and sampling defaults."""

    def content(path: Path) -> bytes | None:
        return path.read_bytes() if path.is_file() else None

    return all(content(one / name) == content(other / name) for name in _SAME_FILES)


class RunEndpoint:
    """A running endpoint of a run; ``host`` is passed to agents' environments."""

    def __init__(self, host: AgentHost, sessions: Sessions, service: EndpointService) -> None:
        self.host = host
        self._sessions = sessions
        self._service = service
        self._before: dict[str, float] = {}

    async def background(self, work: Coroutine[Any, Any, _T]) -> _T:
        """See `Generation.with_endpoint`."""
        result: _T = await first_of(work, self._service.run_until_lost())
        return result

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call of `take`."""
        sessions, requests = self._sessions.counts(), self._service.counts
        totals: dict[str, float] = {
            "endpoint/requests": requests.received,
            "endpoint/completed": requests.completed,
            "endpoint/aborted": requests.aborted,
            "endpoint/missing_calls": requests.by_event["missing_calls"],
            "endpoint/broken_calls": requests.by_event["broken_calls"],
            **{f"endpoint/refused/{code}": n for code, n in requests.by_refusal.items()},
            **{f"endpoint/{event}": n for event, n in requests.by_event.items()},
            **{f"endpoint/sessions/{one}": sessions[f"sessions_{one}"] for one in SessionEnding},
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
    endpoint: Endpoint,
    router: GeneratorRouter,
    config: EndpointConfig,
    keys: Keys,
    *,
    say: Callable[[str], None],
    on_failure: Callable[[Failure], None],
) -> AsyncIterator[RunEndpoint]:
    """Serve clients and agents on a started endpoint while the context is open. ``say`` and
    ``on_failure``: see `EndpointRestarts`."""
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
                restarts=EndpointRestarts(
                    max_restarts=config.max_restarts, say=say, on_failure=on_failure
                ),
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
