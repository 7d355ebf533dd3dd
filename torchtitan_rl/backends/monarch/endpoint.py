"""Runs the OpenAI-compatible endpoint in a separate process: one actor, and the HTTP server in a
second thread.

The controller opens the listening socket, and each process gets a copy of it. So the port stays the
run's, and clients that connect while no process serves wait for the next one.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from monarch.actor import Actor, Port, concurrent_endpoint

from torchtitan_rl.aio import background
from torchtitan_rl.backends.monarch.runtime import (
    ActorChannel,
    ProcessMesh,
    serve_channel,
    spawn_processes,
    stop_processes,
)
from torchtitan_rl.backends.specs import EndpointSpec
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.config.model import takes_images
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import DeadlineError, EndpointLostError, ProcessLostError
from torchtitan_rl.processes import collecting_later
from torchtitan_rl.serving.config import listen, reachable
from torchtitan_rl.serving.link import ToController, ToEndpoint

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.http_server import HttpServer
    from torchtitan_rl.serving.link import ControllerLink

# The endpoint's process is lost if it sends nothing for this time, although it gets statuses.
_SILENCE_S = 60.0
_KILL_S = 0.1  # a lost process gets no time to end by itself
_CLOSE_GRACE_S = 15.0  # in addition to the grace period of requests
_RECEIVE_S = 60.0
_OTHER_CONNECTIONS = 8192  # idle ones, and ones that wait for a lease

_T = TypeVar("_T")


class EndpointActor(Actor):
    def __init__(self, spec: EndpointSpec) -> None:
        self._spec = spec

    @concurrent_endpoint
    async def start(self, path: str, follows: bool) -> None:
        """Serve on the socket that `_offered` offers at ``path``. ``follows``: another process of
        the run served before."""
        listening = await asyncio.to_thread(_received, path)
        with collecting_later():
            self._server, self._link = await asyncio.to_thread(
                start_server, self._spec, listening, follows=follows
            )

    @concurrent_endpoint
    async def connect(self, port: Port[Any]) -> None:
        await serve_channel(port, deliver=self._link.deliver, take=self._link.take)

    @concurrent_endpoint
    async def close(self, grace_s: float) -> None:
        await asyncio.to_thread(self._server.close, grace_s)


@asynccontextmanager
async def _offered(listening: socket.socket) -> AsyncIterator[str]:
    """Offer a copy of a socket to one process of this user, at the path that this yields."""
    loop = asyncio.get_running_loop()
    with (
        tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as folder,  # only this user can enter
        socket.socket(socket.AF_UNIX) as offer,
    ):
        path = str(Path(folder, "socket"))
        offer.bind(path)
        offer.listen()
        offer.setblocking(False)

        async def hand_over() -> None:
            connection, _ = await loop.sock_accept(offer)
            with connection:
                socket.send_fds(connection, [b"listening"], [listening.fileno()])

        async with background(hand_over()):
            yield path


def _received(path: str) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_RECEIVE_S)
        connection.connect(path)
        _, (descriptor,), _, _ = socket.recv_fds(connection, 16, 1)
    listening = socket.socket(fileno=descriptor)
    listening.set_inheritable(False)
    return listening


def start_server(
    spec: EndpointSpec, listening: socket.socket, *, follows: bool
) -> tuple[HttpServer, ControllerLink]:
    """Start the server in this process. Without an API key, only processes of this user are
    served."""
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
            follows=follows,
            takes_images=takes_images(spec.model),
        )
        link.add_gauges(app.counts)
        link.add_gauges(server.counts)
        return app

    server = HttpServer(
        build,
        at_end=link.close,
        listening=listening,
        limits=ConnectionLimits(max_connections=_OTHER_CONNECTIONS + most_requests),
    )
    server.start()
    return server, link


class MonarchEndpoint:
    """The controller's view of the endpoint's process; see `Endpoint`."""

    def __init__(self, group: ProcessGroup, spec: EndpointSpec) -> None:
        self._group = group
        self._spec = spec
        self._number = 0  # of processes so far
        self._listening = listen(spec.endpoint.host, spec.endpoint.port)
        port = self._listening.getsockname()[1]
        self.base_url = f"http://{reachable(spec.endpoint.host)}:{port}/v1"
        self._mesh: ProcessMesh | None = None
        self._actor: Any
        self._channel: ActorChannel[tuple[ToEndpoint, ...], tuple[ToController, ...]]

    @classmethod
    async def spawn(cls, group: ProcessGroup, spec: EndpointSpec) -> MonarchEndpoint:
        """Start the process; `start` then builds the server in it. Raises EndpointLostError: the
        address is taken."""
        endpoint = cls(group, spec)
        await endpoint._spawn()
        return endpoint

    @property
    def name(self) -> str:
        first = self._group.name
        return first if self._number < 2 else f"{first}-{self._number}"

    async def _spawn(self) -> None:
        self._number += 1
        environment = engine_environment(self._group.threads, self._spec.device)
        if self._spec.device == "cuda":  # its vLLM computes nothing, so it needs no device's memory
            environment["CUDA_VISIBLE_DEVICES"] = ""
        group = replace(self._group, name=self.name)
        mesh = await spawn_processes(group, log_dir=self._spec.log_dir, environment=environment)
        self._mesh, self._channel = mesh, ActorChannel(mesh)
        self._actor = mesh.mesh.spawn("endpoint", EndpointActor, self._spec).slice(ranks=0)

    async def start(self) -> None:
        """Start the server. Returns once clients are served.

        Raises:
            EndpointLostError: the server cannot be built, or its process is gone.
            DeadlineError: the start took longer than ``start_timeout_s``.
        """
        timeout_s, follows = self._spec.endpoint.start_timeout_s, self._number > 1
        async with _offered(self._listening) as path:
            started = self._actor.start.call_one(path, follows)
            await self._call(started, "start", timeout_s)
        await _checked(self._channel.open(self._actor.connect.call_one, timeout_s=_SILENCE_S))

    async def restart(self) -> None:
        """Kill what is left of the process, and start another one on the same socket. Raises
        DeadlineError, ProcessLostError: it did not start."""
        await self._end_process(_KILL_S)
        await self._spawn()

    def send(self, messages: tuple[ToEndpoint, ...]) -> None:
        self._channel.send(messages)

    async def receive(self) -> tuple[ToController, ...]:
        return await _checked(self._channel.receive(timeout_s=_SILENCE_S))

    async def drain(self, grace_s: float) -> None:
        """Stop listening. Running requests have ``grace_s`` seconds to end."""
        self._listening.close()
        await self._call(self._actor.close.call_one(grace_s), "close", grace_s + _CLOSE_GRACE_S)

    async def close(self) -> None:
        self._listening.close()
        await self._end_process()

    async def _end_process(self, kill_after_s: float | None = None) -> None:
        if self._mesh is None:
            return
        mesh, self._mesh = self._mesh, None
        await self._channel.close()
        if kill_after_s is not None:
            await mesh.processes.end(kill_after_s)
        await stop_processes(mesh)

    async def _call(self, awaitable: Any, what: str, timeout_s: float) -> Any:
        assert self._mesh is not None
        calling = self._mesh.call(awaitable, what=f"endpoint: {what}", timeout_s=timeout_s)
        return await _checked(calling)


async def _checked(work: Awaitable[_T]) -> _T:
    try:
        return await work
    except (ProcessLostError, DeadlineError) as error:
        raise EndpointLostError(f"the endpoint's process is lost: {error}") from error
