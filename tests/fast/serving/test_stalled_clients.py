"""A client that does not read keeps neither its place nor its request."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.types import Message

from tests.support.async_tests import on_virtual_clock
from tests.support.endpoints import now
from tests.support.http_driver import CHAT, Client, settle
from torchtitan_rl.backends.monarch.http_server import HttpServer
from torchtitan_rl.serving.address import Keys
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.context import close_at_end
from torchtitan_rl.serving.link import ControllerLink
from torchtitan_rl.serving.retries import RetryOptions

KEY = {"Idempotency-Key": "k"}


class SlowReader(Client):
    """Its connection takes ``capacity`` messages, and then none until ``reads`` is set."""

    def __init__(self, *args: Any, capacity: int = 3, **options: Any) -> None:
        self._capacity = capacity
        self.reads = asyncio.Event()
        super().__init__(*args, **options)

    async def _send(self, message: Message) -> None:
        if len(self.sent) >= self._capacity:
            await self.reads.wait()
        await super()._send(message)


class Streaming:
    """An endpoint with an endless stream, one piece each ``piece_s``."""

    def __init__(self, *, piece: bytes = b"piece", piece_s: float = 0.1, **options: Any) -> None:
        self.has_ended = threading.Event()
        self.num_streams = 0
        self.num_pieces = 0
        app = FastAPI()

        async def pieces() -> Any:
            self.num_streams += 1
            try:
                while True:
                    await asyncio.sleep(piece_s)
                    self.num_pieces += 1
                    yield piece
            finally:
                self.num_streams -= 1
                self.has_ended.set()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> StreamingResponse:
            stream = pieces()
            close_at_end(stream.aclose)
            return StreamingResponse(stream)

        link = ControllerLink()
        config = EndpointConfig(max_concurrent_requests=1)
        self.app = EndpointApp(app, config, keys=Keys(), commands=link, **options)

    @property
    def counts(self) -> Any:
        return self.app.counts()


@pytest.mark.parametrize("headers", [{}, KEY])
@on_virtual_clock
async def test_a_client_that_does_not_read_loses_its_place_and_its_stream_ends(
    headers: dict[str, str],
) -> None:
    served = Streaming(retries=RetryOptions(grace_s=5.0))
    client = SlowReader(served.app, headers=headers)
    await asyncio.sleep(10.0)
    assert served.num_streams == served.counts["http_requests_running"] == 1
    await client.task
    assert now() == pytest.approx(60.2, abs=0.2)
    assert served.counts["http_clients_stalled_total"] == 1
    await asyncio.sleep(6.0)  # the grace in which it may ask again
    assert served.num_streams == served.counts["http_requests_running"] == 0
    assert not client.is_whole


@on_virtual_clock
async def test_a_stream_that_is_not_read_is_not_generated_ahead() -> None:
    served = Streaming()
    SlowReader(served.app)
    await asyncio.sleep(50.0)
    assert served.num_pieces <= 4
    await asyncio.sleep(20.0)


@on_virtual_clock
async def test_a_client_that_reads_slowly_keeps_its_stream() -> None:
    served = Streaming()
    client = SlowReader(served.app)
    for _ in range(10):
        await asyncio.sleep(50.0)
        client._capacity = len(client.sent) + 1
        client.reads.set()
        await settle()
        client.reads.clear()
    assert served.num_streams == 1
    assert served.counts["http_clients_stalled_total"] == 0
    await client.leave()
    await settle()
    assert served.num_streams == 0


def test_the_real_server_closes_the_connection_of_a_client_that_does_not_read() -> None:
    served = Streaming(piece=bytes(1 << 20), piece_s=0.0, stall_timeout_s=0.2)

    async def build() -> Any:
        return served.app

    server = HttpServer(build, at_end=lambda: None, host="127.0.0.1", port=0)
    server.start()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % CHAT.encode())
        assert served.has_ended.wait(60)
        while client.recv(1 << 20):  # what was on its way; then the end
            pass
    server.close(0.0)
    assert served.num_streams == 0
