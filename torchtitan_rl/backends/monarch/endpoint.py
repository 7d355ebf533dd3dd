"""Runs the OpenAI-compatible endpoint in a separate process: one actor, and the HTTP server in a
second thread.

The actor connects its `ControllerLink` with the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from monarch.actor import Actor, Port, concurrent_endpoint

from torchtitan_rl.backends.monarch.runtime import (
    ActorChannel,
    ProcessMesh,
    call,
    serve_channel,
    spawn_processes,
    stop_processes,
)
from torchtitan_rl.backends.specs import EndpointSpec
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import DeadlineError, EndpointLostError, ProcessLostError
from torchtitan_rl.processes import collecting_later
from torchtitan_rl.serving.config import reachable
from torchtitan_rl.serving.link import ToController, ToEndpoint

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.http_server import HttpServer
    from torchtitan_rl.serving.link import ControllerLink

# The endpoint's process is lost if it sends nothing for this time, although it gets statuses.
_SILENCE_S = 60.0
_CLOSE_GRACE_S = 15.0  # in addition to the grace period of requests
_OTHER_CONNECTIONS = 8192  # idle ones, and ones that wait for a lease

_T = TypeVar("_T")


class EndpointActor(Actor):
    """The endpoint's process."""

    def __init__(self, spec: EndpointSpec) -> None:
        self._spec = spec

    @concurrent_endpoint
    async def start(self) -> int:
        """Bind the address and serve. Returns the port."""
        with collecting_later():
            self._server, self._link = await asyncio.to_thread(start_server, self._spec)
        return self._server.port

    @concurrent_endpoint
    async def connect(self, port: Port[Any]) -> None:
        """Serve the channel until it fails."""
        await serve_channel(port, deliver=self._link.deliver, take=self._link.take)

    @concurrent_endpoint
    async def close(self, grace_s: float) -> None:
        await asyncio.to_thread(self._server.close, grace_s)


def start_server(spec: EndpointSpec) -> tuple[HttpServer, ControllerLink]:
    """Start the server in this process. Without an API key, only processes of this user are served.

    Raises:
        EndpointLostError: the address is taken.
    """
    import uvloop

    from torchtitan_rl.backends.monarch.http_server import HttpServer
    from torchtitan_rl.backends.vllm.openai import build_application
    from torchtitan_rl.launch.own_user import accept_own_user
    from torchtitan_rl.serving.app import EndpointApp
    from torchtitan_rl.serving.connections import ConnectionLimits
    from torchtitan_rl.serving.link import ControllerLink

    if not spec.keys.api:
        accept_own_user(uvloop.loop.__file__, "accept4")
    link = ControllerLink()
    config = spec.endpoint
    most_requests = config.max_concurrent_requests + config.max_queued_requests

    async def build() -> EndpointApp:
        link.attach()
        app = EndpointApp(
            build_application(spec, link),
            config,
            keys=spec.keys,
            commands=link,
            max_requests=server.max_requests,
        )
        link.add_gauges(app.counts)
        link.add_gauges(server.counts)
        return app

    server = HttpServer(
        build,
        at_end=link.close,
        host=config.host,
        port=config.port,
        limits=ConnectionLimits(max_connections=_OTHER_CONNECTIONS + most_requests),
    )
    server.start()
    return server, link


class MonarchEndpoint:
    """The controller's view of the endpoint's process; see `Endpoint`."""

    def __init__(self, mesh: ProcessMesh, spec: EndpointSpec) -> None:
        self._mesh = mesh
        self._spec = spec
        self._actor: Any = mesh.mesh.spawn("endpoint", EndpointActor, spec).slice(ranks=0)
        self._channel: ActorChannel[tuple[ToEndpoint, ...], tuple[ToController, ...]]
        self._channel = ActorChannel(mesh)
        self._base_url = ""

    @classmethod
    async def spawn(cls, group: ProcessGroup, spec: EndpointSpec) -> MonarchEndpoint:
        """Start the process; `start` then builds the server in it."""
        environment = engine_environment(group.threads, spec.device)
        if spec.device == "cuda":  # its vLLM computes nothing, so it needs no memory of a device
            environment["CUDA_VISIBLE_DEVICES"] = ""
        mesh = await spawn_processes(group, log_dir=spec.log_dir, environment=environment)
        return cls(mesh, spec)

    @property
    def base_url(self) -> str:
        return self._base_url

    async def start(self) -> None:
        """Start the server. Returns once clients can connect.

        Raises:
            EndpointLostError: the address is taken, or the server cannot be built.
            DeadlineError: the start took longer than ``start_timeout_s``.
        """
        timeout_s = self._spec.endpoint.start_timeout_s
        port = await self._call(self._actor.start.call_one(), "start", timeout_s)
        await _checked(self._channel.open(self._actor.connect.call_one, timeout_s=_SILENCE_S))
        self._base_url = f"http://{reachable(self._spec.endpoint.host)}:{port}/v1"

    def send(self, messages: tuple[ToEndpoint, ...]) -> None:
        self._channel.send(messages)

    async def receive(self) -> tuple[ToController, ...]:
        return await _checked(self._channel.receive(timeout_s=_SILENCE_S))

    async def drain(self, grace_s: float) -> None:
        """Stop listening. Running requests have ``grace_s`` seconds to end."""
        await self._call(self._actor.close.call_one(grace_s), "close", grace_s + _CLOSE_GRACE_S)

    async def close(self) -> None:
        """End the process, in any state."""
        await self._channel.close()
        await stop_processes(self._mesh)

    async def _call(self, awaitable: Any, what: str, timeout_s: float) -> Any:
        return await _checked(call(awaitable, what=f"endpoint: {what}", timeout_s=timeout_s))


async def _checked(work: Awaitable[_T]) -> _T:
    try:
        return await work
    except (ProcessLostError, DeadlineError) as error:
        raise EndpointLostError(f"the endpoint's process is lost: {error}") from error
