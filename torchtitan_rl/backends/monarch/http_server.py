"""Serves an ASGI application with uvicorn on uvloop, in a separate thread.

Invariants: the server listens on the address before the application is built, so that no other
process can take the address. Clients that connect before the application is ready wait for it. The
thread ends within the deadline of `close`, whatever clients do. For a request that still runs at
the end of the grace period, ``at_end`` determines the answer.

The implementation of HTTP is uvicorn's (with httptools). This module adds bounds on the resources
that connections can use.

A connection *waits* unless it has a whole request that is not answered yet.

| bound | if exceeded |
|---|---|
| 16 KiB for a head, a chunk's size, or trailers; 100 headers, 100 trailers | 400 |
| 4,096 chunks of a body, and one more for each KiB (each chunk takes time) | 400 |
| ``head_s`` for a head to arrive, ``body_s`` for a body | the connection is closed |
| ``max_connections`` | the connection that has waited longest is closed |
| ``read_s`` for a client to read 64 KiB of its answer | the connection is closed |

Invariant: a connection has one request at a time, so an error is never mistaken for the answer to
another request. A client that sends a second request before it has the answer to the first one is
disconnected, as HTTP allows.

uvicorn's implementation with h11 has a setting for the size of a head, but takes ten times as long
to read chunks. Neither implementation has the other bounds.
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
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import psutil
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.config import listen

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.01
_ANSWER_S = 2.0  # after the grace period, for refusals to be sent
_JOIN_S = 5.0  # in addition to the grace period and `_ANSWER_S`
_BACKLOG = 2048
_UNREAD_S = 120.0  # a connection whose client reads nothing for this time is dropped
_OTHER_FILES = 256  # files that the process may open besides connections


class HttpServer:
    """An HTTP server in its own thread.

    ``build`` creates the application, on the event loop that then serves it. ``at_end`` is called
    on the same loop exactly once: at the end of the grace period of `close`, or before the loop
    ends. ``counts`` is `Connections.counts`. If the process may open only few files, the server
    accepts fewer connections than ``limits`` allows. The application must refuse more than
    ``max_requests`` simultaneous requests, so that other clients can connect.

    Raises:
        EndpointLostError: the address is taken.
    """

    def __init__(
        self,
        build: Callable[[], Awaitable[Any]],
        *,
        at_end: Callable[[], None],
        host: str,
        port: int,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._build = build
        self._at_end = at_end
        self._socket = listen(host, port, backlog=_BACKLOG)
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
                    backlog=_BACKLOG,
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
    """Raise this process's limit on open files if ``limits`` need more. If the limit stays too low,
    return lower ``limits``."""
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


_MAX_HEAD_BYTES = 16 << 10
_MAX_HEADERS = 100
_MAX_SMALL_CHUNKS = 4096
_CHUNK_BYTES = 1024  # bytes of a body that allow one more chunk
_MIN_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_connections: int = 8192
    head_s: float = 60.0
    body_s: float = 70.0  # after 60 s the application itself answers a late body
    read_s: float = 60.0


class Connections:
    """All connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        # An OrderedDict finds its first item at once; a dict from which many items were removed has
        # to search.
        self.waiting: OrderedDict[BoundedProtocol, None] = OrderedDict()  # longest waiting first
        self.number = 0
        self._num_cut = 0

    def add(self, connection: BoundedProtocol) -> None:
        self.number += 1
        self.waiting[connection] = None
        if self.number > self.limits.max_connections:
            self.cut(next(iter(self.waiting)))

    def remove(self, connection: BoundedProtocol) -> None:
        self.number -= 1
        self.waiting.pop(connection, None)

    def cut(self, connection: BoundedProtocol) -> None:
        self.waiting.pop(connection, None)
        self._num_cut += 1
        connection.transport.abort()

    def counts(self) -> Mapping[str, float]:
        """Gauges and counters, named as in Prometheus. Callable from any thread."""
        return {"http_connections": self.number, "http_connections_cut_total": self._num_cut}


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``options`` are those of uvicorn's protocol."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._is_whole = True  # whether the last request, if any, is whole
        self._num_small_chunks = 0.0  # chunks beyond one for each KiB of the body
        self._num_unused = 0  # bytes since the last byte that ended a head or belonged to a body
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.add(self)
        self._expect_within(self._connections.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._expect_within(None)
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self in self._connections.waiting:
            self._expect_within(self._connections.limits.head_s)
        for start in range(0, len(data), _MAX_HEAD_BYTES):
            piece = data[start : start + _MAX_HEAD_BYTES]
            self._num_unused += len(piece)
            super().data_received(piece)
            if self._num_unused >= _MAX_HEAD_BYTES:
                self.send_400_response("The request's head is too large.")
            if self.transport.is_closing():
                return

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            raise ValueError("a request before the answer to the last one")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) == _MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.headers = []  # trailers, which no handler reads
        self._num_unused = self._num_small_chunks = 0
        self._is_whole = False
        self._expect_within(self._connections.limits.body_s)

    def on_chunk_header(self) -> None:
        self._num_small_chunks += 1
        if self._num_small_chunks > _MAX_SMALL_CHUNKS:
            raise ValueError("too many chunks")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_unused = 0
        self._num_small_chunks -= len(body) / _CHUNK_BYTES

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_unused = 0
        self._is_whole = True
        if self.cycle.response_complete:
            self._expect_within(self._connections.limits.head_s)
        else:
            self._expect_within(None)
            self._connections.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.cycle.body = bytearray()  # the part received before the refusal
        if not self.transport.is_closing():
            self._connections.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        """Close the connection, with an error if the client expects an answer."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or (
            cycle.response_complete if self._is_whole else not cycle.response_started
        ):
            super().send_400_response(msg)
        else:
            self._connections.cut(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def _expect_within(self, seconds: float | None) -> None:
        """Cut the connection if the next part of the request does not come within ``seconds``;
        None: no part is expected."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._connections.cut, self)

    def _expect_reading(self) -> None:
        most = self.transport.get_write_buffer_size() - _MIN_READ_BYTES
        self._reading = self.loop.call_later(
            self._connections.limits.read_s, self._check_reading, most
        )

    def _check_reading(self, most: int) -> None:
        if self.transport.get_write_buffer_size() > most:
            self._connections.cut(self)
        else:
            self._expect_reading()
