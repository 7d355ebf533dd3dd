"""Serves an ASGI application with uvicorn on uvloop, in a separate thread.

Invariants: the socket listens before the application is built, so clients that connect before the
application is ready wait for it. The thread ends within the deadline of `close`, whatever clients
do. For a request that still runs at the end of the grace period, ``at_end`` determines the answer.
`serving/connections.py` bounds the resources that connections can use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

import psutil
import uvicorn
import uvloop

from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.config import BACKLOG
from torchtitan_rl.serving.connections import BoundedProtocol, ConnectionLimits, Connections

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.01
_ANSWER_S = 2.0  # after the grace period, for refusals to be sent
_JOIN_S = 5.0  # in addition to the grace period and `_ANSWER_S`
_UNREAD_S = 120.0  # a connection whose client reads nothing for this time is dropped
_OTHER_FILES = 256  # files that the process may open besides connections


class HttpServer:
    """An HTTP server in its own thread, on the socket ``listening``.

    ``build`` creates the application, on the event loop that then serves it. ``at_end`` is called
    on the same loop exactly once: at the end of the grace period of `close`, or before the loop
    ends. If the process may open only few files, the server accepts fewer connections than
    ``limits`` allows. The application must refuse more than ``max_requests`` simultaneous requests,
    so that other clients can connect.
    """

    def __init__(
        self,
        build: Callable[[], Awaitable[Any]],
        *,
        at_end: Callable[[], None],
        listening: socket.socket,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._build = build
        self._at_end = at_end
        self._socket = listening
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            self._socket.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * _UNREAD_S)
            )
        self.port = int(self._socket.getsockname()[1])
        self._connections = Connections(_within_descriptors(limits or ConnectionLimits()))
        self.counts = self._connections.counts
        self.max_requests = 3 * self._connections.limits.max_connections // 4
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended = False
        self._server: uvicorn.Server | None = None
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Start the thread. Returns once clients are served.

        Raises:
            EndpointLostError: the server did not start.
            Exception: ``build`` raised it.
        """
        self._thread.start()
        self._started.result()

    def close(self, grace_s: float) -> None:
        """Stop accepting connections. Running requests have ``grace_s`` seconds to end."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed after the check
                self._loop.call_soon_threadsafe(self._begin_end, grace_s)
        if self._thread.is_alive():
            self._thread.join(grace_s + _ANSWER_S + _JOIN_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            if self._started.done():
                logger.exception("the HTTP server has failed")
            else:
                self._started.set_exception(error)

    def _begin_end(self, grace_s: float) -> None:
        if self._server is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s + _ANSWER_S)
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(grace_s, self._end_once)

    def _end_once(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._at_end()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            application = await self._build()
            self._server = server = uvicorn.Server(
                uvicorn.Config(
                    application,
                    http=cast(Any, partial(BoundedProtocol, self._connections)),
                    ws="none",
                    log_level="error",  # a warning for each bad request would fill the disk
                    access_log=False,
                    server_header=False,
                    lifespan="on",
                    timeout_keep_alive=60,
                    backlog=BACKLOG,
                )
            )
            serving = asyncio.create_task(_run_server(server, self._socket))
            while not (server.started or serving.done()):  # noqa: ASYNC110 (uvicorn has no event)
                await asyncio.sleep(_READY_POLL_S)
            if server.started:
                self._started.set_result(None)
            await serving
            if not self._started.done():
                raise EndpointLostError("the HTTP server ended before it was ready")
        finally:
            self._end_once()


def _within_descriptors(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise this process's limit on open files for ``limits``; return lower ones if that is
    impossible."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in (now, most))
    num_others = psutil.Process().num_fds() + _OTHER_FILES
    wanted = min(num_others + limits.max_connections, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    room = max(soft, wanted) - num_others
    return replace(limits, max_connections=max(4, min(room, limits.max_connections)))


async def _run_server(server: uvicorn.Server, listening: socket.socket) -> None:
    try:
        await server.serve(sockets=[listening])
    except SystemExit as error:  # a SystemExit would end the event loop at once
        raise EndpointLostError(f"the HTTP server did not start: exit code {error.code}") from error
