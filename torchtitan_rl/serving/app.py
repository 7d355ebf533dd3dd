"""The application that the HTTP server runs: an OpenAI application inside the endpoint's layers.

| layer, from outside in | what it does |
|---|---|
| `AnthropicErrors` | gives errors of `/v1/messages` that API's shape |
| `OpenAIErrors` | turns what the layers raise into OpenAI error objects |
| `Authentication` | checks keys, finds the session |
| `BufferedBody` | reads the body, checks its size and content |
| `Retries` | answers a repeated request from its first run |
| `OpenAIErrors` | as above, so that `Retries` sees refusals and failures as responses |
| `Admission` | bounds how many requests run and queue |
| the application | vLLM's routes, and those of `routes` |

`/health` passes none of them but `OpenAIErrors`, so that nobody without a key takes a place.
Everything is plain ASGI, so streams pass chunk by chunk and a client's disconnect reaches the
application's handlers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from torchtitan_rl.serving.address import Keys
from torchtitan_rl.serving.admission import Admission
from torchtitan_rl.serving.anthropic_errors import AnthropicErrors
from torchtitan_rl.serving.auth import Authentication, is_open
from torchtitan_rl.serving.body import BufferedBody
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.context import request_scope
from torchtitan_rl.serving.errors import OpenAIErrors
from torchtitan_rl.serving.retries import Retries, RetryOptions
from torchtitan_rl.serving.route_parts import Commands
from torchtitan_rl.serving.routes import add_routes


class EndpointApp:
    """The ASGI application to serve; adds the routes of sessions and administration to ``app``.

    ``max_requests``: that are open at once, whatever they ask for. ``body_timeout_s``: for a
    request's body to arrive.

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
        max_requests: int = sys.maxsize,
        body_timeout_s: float = 60.0,
    ) -> None:
        add_routes(app, commands)
        self._app = app
        self._admission = Admission(
            self._handle,
            max_running=config.max_concurrent_requests,
            max_queued=config.max_queued_requests,
        )
        self._retries = Retries(OpenAIErrors(self._admission), retries or RetryOptions())
        body = BufferedBody(
            self._retries, config, timeout_s=body_timeout_s, max_requests=max_requests
        )
        authentication = Authentication(body, host=config.host, keys=keys)
        self._layers = AnthropicErrors(OpenAIErrors(authentication, replaces_500=False))
        self._open = OpenAIErrors(self._handle)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._retries.close()
        elif is_open(scope):
            await self._open(scope, receive, send)
        else:
            await self._layers(scope, receive, send)

    def counts(self) -> Mapping[str, float]:
        """Gauges and counters, named as in Prometheus. Callable from any thread."""
        return {
            "http_requests_running": self._admission.num_running,
            "http_requests_queued": self._admission.num_queued,
            "http_requests_refused_total": self._admission.num_refused,
            "http_requests_replayed_total": self._retries.num_replayed,
            "http_answers_kept": self._retries.num_kept,
            "http_requests_remembered": self._retries.num_remembered,
        }

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with request_scope():
            await self._app(scope, receive, send)
