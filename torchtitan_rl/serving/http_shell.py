"""Everything between the HTTP server and the app that answers: one call builds it.

From outside in: clients that do not read (`http_stalls`), errors (`http_errors`), who asks
(`http_auth`), the body and its limits (`http_body`, `http_limits`, `http_text_only`), retries
(`http_retries`), places (`http_admission`), what is closed at the end (`http_closings`), the app
with the routes of sessions and administration (`http_routes`). Plain ASGI throughout, so streams
pass chunk by chunk and a client's disconnect reaches the app's handlers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from torchtitan_rl.serving.http_admission import Admission
from torchtitan_rl.serving.http_auth import Authentication
from torchtitan_rl.serving.http_body import BufferedBody
from torchtitan_rl.serving.http_closings import Closings
from torchtitan_rl.serving.http_errors import OpenAIErrors
from torchtitan_rl.serving.http_limits import RequestLimits
from torchtitan_rl.serving.http_retries import Retries, RetryOptions
from torchtitan_rl.serving.http_routes import Commands, add_routes
from torchtitan_rl.serving.http_stalls import StalledClients


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellOptions:
    """Keys are empty where none is configured."""

    host: str = "127.0.0.1"
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    limits: RequestLimits = field(default_factory=RequestLimits)
    max_concurrent_requests: int = 256
    max_queued_requests: int = 1024
    body_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0  # for a client to read what was sent
    retries: RetryOptions = field(default_factory=RetryOptions)


def protect(app: FastAPI, options: ShellOptions, *, commands: Commands) -> HttpShell:
    """Adds the routes of sessions and administration to ``app`` and returns what is to be served
    in its place.

    Raises:
        ConfigError: the keys cannot protect an endpoint on ``options.host``.
    """
    add_routes(app, commands)
    return HttpShell(app, options)


class HttpShell:
    """The ASGI app to serve. ``counts`` may be read from any thread."""

    def __init__(self, app: FastAPI, options: ShellOptions) -> None:
        self._app = app
        self._admission = Admission(
            Closings(app),
            max_running=options.max_concurrent_requests,
            max_queued=options.max_queued_requests,
        )
        self._retries = Retries(OpenAIErrors(self._admission), options.retries)
        body = BufferedBody(self._retries, limits=options.limits, timeout_s=options.body_timeout_s)
        authentication = Authentication(
            body, host=options.host, api_key=options.api_key, admin_key=options.admin_key
        )
        self._shell = StalledClients(
            OpenAIErrors(authentication), timeout_s=options.stall_timeout_s
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._shell(scope, receive, send)
        elif scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._retries.close()
        else:  # nothing here speaks over a web socket
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    def counts(self) -> Mapping[str, float]:
        """Gauges and counters, named as Prometheus wants them."""
        return {
            "http_requests_running": self._admission.num_running,
            "http_requests_queued": self._admission.num_queued,
            "http_requests_refused_total": self._admission.num_refused,
            "http_requests_replayed_total": self._retries.num_replayed,
            "http_clients_stalled_total": self._shell.num_stalled,
            "http_answers_kept": self._retries.num_kept,
            "http_requests_remembered": self._retries.num_known,
        }
