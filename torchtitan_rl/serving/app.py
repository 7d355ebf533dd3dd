"""The application that the HTTP server runs: an OpenAI application, and what each request passes
before it.

| part | what it does |
|---|---|
| `answer_errors` | makes error objects of what the other parts raise |
| `authenticate` | checks the key, finds the session |
| `Bodies`, `check_body` | read the body, check its size and content |
| `Retries` | answers a repeated request from its first run |
| `answer_errors` | as above, so that `Retries` sees refusals and failures as responses |
| `Admission` | bounds how many requests run and queue |
| the application | vLLM's routes, and those of `routes` |

Everything is plain ASGI, so streams pass chunk by chunk and a client's disconnect reaches the
application's handlers. ``GET /health`` passes none of the parts but `answer_errors`, so that no
client without a key takes a place.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.errors import RefusedError, answer_errors
from torchtitan_rl.serving.limits import check_body
from torchtitan_rl.serving.middleware import (
    Admission,
    Bodies,
    BufferedRequest,
    authenticate,
    is_open,
    request_scope,
    session_id,
)
from torchtitan_rl.serving.retries import Retries, RetryOptions
from torchtitan_rl.serving.routes import Commands, add_routes


class EndpointApp:
    """The ASGI application to serve; adds the endpoint's own routes to ``app``.

    ``max_requests``: that are open at once, whatever they ask for. ``body_timeout_s``: for a
    request's body to arrive. ``queue_timeout_s``: for a place to become free.

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
        queue_timeout_s: float = 600.0,
    ) -> None:
        if errors := keys.errors(config.host):
            raise ConfigError(errors)
        add_routes(app, commands)
        self._app = app
        self._config = config
        self._keys = keys
        self._max_requests = max_requests
        self._num_requests = 0  # whose body has arrived
        self._bodies = Bodies(config.max_body_bytes, timeout_s=body_timeout_s)
        self._admission = Admission(
            max_running=config.max_concurrent_requests,
            max_queued=config.max_queued_requests,
            timeout_s=queue_timeout_s,
        )
        self._retries = Retries(self._run, retries or RetryOptions())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._retries.close()
        elif is_open(scope):
            await answer_errors(scope, send, partial(self._handle, scope, receive))
        else:
            handle = partial(self._serve, scope, receive)
            await answer_errors(scope, send, handle, replaces_500=False)

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

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id.set(authenticate(scope, self._keys))
        request = await self._bodies.read(scope, receive)
        if request is None:
            return
        try:
            if request.body:
                check_body(request.body, scope["path"], self._config)
            if self._num_requests >= self._max_requests:
                message = f"{self._num_requests} requests are open, as many as may be."
                headers = {"retry-after": "1"}
                raise RefusedError(429, "too_many_requests", message, headers=headers)
            self._num_requests += 1
            try:
                await self._retries(scope, request, send)
            finally:
                self._num_requests -= 1
        finally:
            request.release()

    async def _run(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        async def handle(send: Send) -> None:
            async with self._admission.place(scope, request) as has_place:
                if has_place:
                    await self._handle(scope, request, send)

        await answer_errors(scope, send, handle)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with request_scope():
            await self._app(scope, receive, send)
