"""The HTTP server's thread: its address, its failures and its end. A real server, no engine."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from torchtitan_rl.backends.monarch.http_server import HttpServer
from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.config import listen


class App:
    """Answers ``/`` at once, and ``/wait`` when it has to end. ``fails``: it does not start."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.waits = threading.Event()
        self.num_ends = 0
        self._ended: Any = None

    async def build(self) -> Any:
        import asyncio

        self._ended = asyncio.Event()
        return self

    def end(self) -> None:
        self.num_ends += 1
        if self._ended is not None:
            self._ended.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": f"lifespan.startup.{'failed' if self.fails else 'complete'}"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        status = 200
        if scope["path"] == "/wait":
            self.waits.set()
            await self._ended.wait()
            status = 503
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


def made(app: App, build: Callable[[], Any] | None = None, port: int = 0) -> HttpServer:
    return HttpServer(build or app.build, at_end=app.end, listening=listen("127.0.0.1", port))


@contextmanager
def started(app: App) -> Iterator[HttpServer]:
    server = made(app)
    server.start()
    try:
        yield server
    finally:
        server.close(0.0)


def get(port: int, path: str = "/") -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def test_a_port_is_bound_before_the_application_is_built() -> None:
    app = App()
    server = made(app)  # nothing is built yet
    with pytest.raises(EndpointLostError, match=r"endpoint\.port"):
        made(App(), port=server.port)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.port))
    server.start()
    assert get(server.port) == 200
    server.close(0.0)
    listen("127.0.0.1", server.port).close()  # given back


def test_an_error_of_building_or_starting_is_raised_by_start() -> None:
    async def build() -> Any:
        raise ZeroDivisionError("no tokenizer")

    app = App()
    server = made(app, build)
    with pytest.raises(ZeroDivisionError, match="no tokenizer"):
        server.start()
    server.close(0.0)
    assert app.num_ends == 1
    app = App(fails=True)
    server = made(app)
    with pytest.raises(EndpointLostError):
        server.start()
    server.close(0.0)


def test_a_request_that_runs_at_the_end_of_the_grace_is_answered_and_not_cut() -> None:
    app = App()
    with started(app) as server:
        statuses: list[int] = []
        client = threading.Thread(target=lambda: statuses.append(get(server.port, "/wait")))
        client.start()
        assert app.waits.wait(60)
        server.close(0.1)
        client.join(60)
        assert statuses == [503]
        assert app.num_ends == 1
