"""Bounds on the resources that the connections of an HTTP server can use.

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

HTTP itself is uvicorn's, with httptools. With h11 uvicorn can bound a head, but takes ten times as
long to read chunks; neither implementation has the other bounds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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


def bounded_server(app: Any, limits: ConnectionLimits) -> uvicorn.Server:
    """A server of an ASGI application alone, without logs, and with these bounds."""
    config = uvicorn.Config(
        app,
        http=cast(Any, partial(BoundedProtocol, Connections(limits))),
        ws="none",
        lifespan="off",
        log_level="critical",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)
