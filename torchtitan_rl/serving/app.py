"""The application that the HTTP server runs: an OpenAI application inside the endpoint's layers.

| layer, from outside in | what it does |
|---|---|
| `StalledClients` | drops clients that do not read their response |
| `AnthropicErrors` | gives errors of `/v1/messages` that API's shape |
| `OpenAIErrors` | turns what the layers raise into OpenAI error objects |
| `Authentication` | checks keys, finds the session |
| `BufferedBody` | reads the body, checks its size and content |
| `Retries` | answers a repeated request from its first run |
| `OpenAIErrors` | as above, so that `Retries` sees refusals and failures as responses |
| `Admission` | bounds how many requests run and queue |
| the application | vLLM's routes, and those of `routes` |

Everything is plain ASGI, so streams pass chunk by chunk and a client's disconnect reaches the
application's handlers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchtitan_rl.serving.address import Keys
from torchtitan_rl.serving.admission import Admission
from torchtitan_rl.serving.anthropic_errors import AnthropicErrors
from torchtitan_rl.serving.auth import Authentication
from torchtitan_rl.serving.body import BufferedBody
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.context import request_scope
from torchtitan_rl.serving.errors import ClientStalledError, OpenAIErrors
from torchtitan_rl.serving.retries import Retries, RetryOptions
from torchtitan_rl.serving.routes import Commands, add_routes

logger = logging.getLogger(__name__)


class EndpointApp:
    """The ASGI application to serve; adds the routes of sessions and administration to ``app``.

    ``body_timeout_s``: for a request's body to arrive. ``stall_timeout_s``: for a client to read
    what was sent.

    Raises:
        ConfigError: the keys cannot protect an endpoint on this address.
    """

    def __init__(
        self,
        app: FastAPI,
        config: EndpointConfig,
        *,
        keys: Keys,
        commands: Commands,
        retries: RetryOptions | None = None,
        body_timeout_s: float = 60.0,
        stall_timeout_s: float = 60.0,
    ) -> None:
        add_routes(app, commands)
        self._app = app
        self._admission = Admission(
            self._handle,
            max_running=config.max_concurrent_requests,
            max_queued=config.max_queued_requests,
        )
        self._retries = Retries(OpenAIErrors(self._admission), retries or RetryOptions())
        body = BufferedBody(self._retries, config, timeout_s=body_timeout_s)
        authentication = Authentication(body, host=config.host, keys=keys)
        self._layers = StalledClients(
            AnthropicErrors(OpenAIErrors(authentication, replaces_500=False)),
            timeout_s=stall_timeout_s,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._layers(scope, receive, send)
        elif scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._retries.close()
        else:  # a web socket, which no route takes
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    def counts(self) -> Mapping[str, float]:
        """Gauges and counters, named as in Prometheus. Callable from any thread."""
        return {
            "http_requests_running": self._admission.num_running,
            "http_requests_queued": self._admission.num_queued,
            "http_requests_refused_total": self._admission.num_refused,
            "http_requests_replayed_total": self._retries.num_replayed,
            "http_clients_stalled_total": self._layers.num_stalled,
            "http_answers_kept": self._retries.num_kept,
            "http_requests_remembered": self._retries.num_remembered,
        }

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with request_scope():
            await self._app(scope, receive, send)


class StalledClients:
    """ASGI middleware: a client that reads nothing for ``timeout_s`` counts as disconnected.

    While a client does not read, the application waits in ``send``, and keeps its place and its
    request in an engine's batch. `ClientStalledError` ends it there, and the server closes the
    connection. At most one chunk of the response is buffered.
    """

    def __init__(self, app: ASGIApp, *, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s
        self.num_stalled = 0  # since the start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    await send(message)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                self.num_stalled += 1
                logger.warning("a client has not read for %.0f s", self._timeout_s)
                raise ClientStalledError from error

        try:
            await self._app(scope, receive, send_in_time)
        except ClientStalledError:
            return  # the response is unfinished: the server closes the connection
