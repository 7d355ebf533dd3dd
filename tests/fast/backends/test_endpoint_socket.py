from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fast.serving.test_http_server import App, get
from torchtitan_rl.backends.monarch.endpoint import _offered, _received
from torchtitan_rl.backends.monarch.http_server import HttpServer
from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.config import listen


def served(listening: socket.socket) -> HttpServer:
    """A server on a copy of the socket, as each process of an endpoint gets one."""

    async def copied() -> socket.socket:
        async with _offered(listening) as path:
            return await asyncio.to_thread(_received, path)

    app = App()
    server = HttpServer(app.build, at_end=app.end, listening=asyncio.run(copied()))
    server.start()
    return server


def test_a_client_that_connects_between_two_processes_waits_and_the_port_stays_taken() -> None:
    listening = listen("127.0.0.1", 0)
    first = served(listening)
    assert get(first.port) == 200
    first.close(0.0)
    with pytest.raises(EndpointLostError, match="in use"):
        listen("127.0.0.1", first.port)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(get, first.port)
        second = served(listening)
        assert answer.result(60) == 200
    assert second.port == first.port
    listening.close()
    second.close(0.0)
    listen("127.0.0.1", first.port).close()  # given back
