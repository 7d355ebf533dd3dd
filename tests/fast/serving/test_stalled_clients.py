"""A client that does not read keeps neither its place nor its request."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import closing
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from tests.support.http_driver import CHAT
from torchtitan_rl.backends.monarch.http_server import HttpServer
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import EndpointConfig, Keys, listen
from torchtitan_rl.serving.connections import ConnectionLimits
from torchtitan_rl.serving.link import ControllerLink
from torchtitan_rl.serving.middleware import close_at_end
from torchtitan_rl.serving.retries import RetryOptions


class Streaming:
    """An endpoint with an endless stream."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        app = FastAPI()

        async def pieces() -> Any:
            try:
                while True:
                    await asyncio.sleep(0)
                    yield bytes(1 << 20)
            finally:
                self.has_ended.set()

        @app.post(CHAT)
        async def chat() -> StreamingResponse:
            stream = pieces()
            close_at_end(stream.aclose)
            return StreamingResponse(stream)

        self.app = EndpointApp(
            app,
            EndpointConfig(),
            keys=Keys(),
            commands=ControllerLink(),
            retries=RetryOptions(grace_s=0.1),
        )

    async def build(self) -> EndpointApp:
        return self.app


@pytest.mark.parametrize("header", [b"A: b", b"Idempotency-Key: k"])
def test_a_client_that_does_not_read_is_cut_and_its_stream_ends(header: bytes) -> None:
    served = Streaming()
    server = HttpServer(
        served.build,
        at_end=lambda: None,
        listening=listen("127.0.0.1", 0),
        limits=ConnectionLimits(read_s=0.2),
    )
    server.start()
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", server.port))
        client.sendall(
            b"POST %b HTTP/1.1\r\n%b\r\nContent-Length: 0\r\n\r\n" % (CHAT.encode(), header)
        )
        assert served.has_ended.wait(60)
        assert server.counts() == {"http_connections": 0, "http_connections_cut_total": 1}
    server.close(0.0)
    assert served.app.counts()["http_requests_running"] == 0
