"""An ASGI application served by uvicorn on uvloop, in a thread of its own.

Invariants: the address is taken before the application is built, so that a taken one is known at
once; nobody can connect before the application is there; the thread ends within the deadline of
`close`, whatever clients do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import uvicorn
import uvloop

from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.address import bind

_READY_POLL_S = 0.01
_JOIN_S = 5.0  # on top of the deadline of a close


class HttpServer:
    """``build`` makes the application, on the event loop that then serves it; ``at_end`` is called
    there before the loop ends, in any case."""

    def __init__(
        self,
        build: Callable[[], Awaitable[Any]],
        *,
        at_end: Callable[[], None],
        host: str,
        port: int,
    ) -> None:
        self._build = build
        self._at_end = at_end
        self._socket = bind(host, port)
        self._server: uvicorn.Server | None = None
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Returns once clients can connect.

        Raises:
            Exception: what building the application raised.
        """
        self._thread.start()
        self._started.result()

    def require_running(self) -> None:
        """Raises `EndpointLostError` where the thread has ended."""
        if not self._thread.is_alive():
            raise EndpointLostError("the HTTP server's thread has ended; see the endpoint's log")

    def close(self, grace_s: float) -> None:
        """No new connections; requests that run may end until ``grace_s`` is over."""
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
            self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(grace_s + _JOIN_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        try:
            application = await self._build()
            self._server = server = uvicorn.Server(
                uvicorn.Config(
                    application,
                    log_level="warning",
                    access_log=False,
                    server_header=False,
                    lifespan="on",
                    timeout_keep_alive=60,
                )
            )
            serving = asyncio.create_task(server.serve(sockets=[self._socket]))
            while not (server.started or serving.done()):  # noqa: ASYNC110 (uvicorn has no event)
                await asyncio.sleep(_READY_POLL_S)
            if server.started:
                self._started.set_result(None)
            await serving
            if not self._started.done():
                raise EndpointLostError("the HTTP server ended before it was ready")
        finally:
            self._at_end()
