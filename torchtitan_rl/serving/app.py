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

The endpoint's own routes: each is one command to the controller.

Those of sessions are in `session_routes`. They are ordinary FastAPI routes, listed in the OpenAPI
document with vLLM's. Clients' input is checked here, and only here; a refusal of the controller
becomes an error with its status.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from torchtitan_rl.generation.commands import PauseMode
from torchtitan_rl.routing.weights import SyncMode
from torchtitan_rl.serving.address import Keys
from torchtitan_rl.serving.admission import Admission
from torchtitan_rl.serving.anthropic_errors import AnthropicErrors
from torchtitan_rl.serving.auth import ADMIN_PREFIX, Authentication, is_open
from torchtitan_rl.serving.body import BufferedBody
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.context import request_scope
from torchtitan_rl.serving.errors import HttpError, OpenAIErrors
from torchtitan_rl.serving.messages import RefusedError
from torchtitan_rl.serving.retries import Retries, RetryOptions
from torchtitan_rl.serving.route_parts import ERRORS, Commands
from torchtitan_rl.serving.session_routes import problem_routes, session_routes


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


MAX_VERSION = 2**31 - 1


class AdminAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")


class LoadWeights(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(
        min_length=1, max_length=4096, description="A directory in Hugging Face format."
    )
    version: int | None = Field(
        default=None, ge=1, le=MAX_VERSION, description="Its number; the next one when left out."
    )
    mode: SyncMode = Field(
        default="hot_swap",
        description="`hot_swap` continues running requests under the new weights; `drain` waits "
        "until they have ended.",
    )


class LoadAnswer(BaseModel):
    """The new version, that of each replica, the replicas that were lost by loading it, and the
    longest time without decoding."""

    model_config = ConfigDict(extra="allow")

    version: int
    replicas: dict[str, int]
    lost: list[str]
    stall_s: float


class VersionsAnswer(BaseModel):
    """The newest policy version, and for each replica the one it serves and its state."""

    model_config = ConfigDict(extra="allow")

    newest: int
    replicas: dict[str, int]
    states: dict[str, str]


def add_routes(app: FastAPI, commands: Commands) -> None:
    """Add the routes to ``app`` and its OpenAPI document."""
    app.add_exception_handler(HttpError, _answer_error)
    app.add_exception_handler(RefusedError, _answer_error)
    app.include_router(session_routes(commands))
    app.include_router(problem_routes(commands))
    app.include_router(_admin(commands))
    app.openapi_schema = None  # the document may have been made before


def _admin(commands: Commands) -> APIRouter:
    router = APIRouter(prefix=ADMIN_PREFIX, tags=["admin"], responses={**ERRORS, 403: ERRORS[401]})

    @router.post("/pause", response_model=AdminAnswer)
    async def pause(mode: Annotated[PauseMode, Query()] = "keep") -> Any:
        """Pause generation: keep running requests frozen, abort them to resume later, or let them
        end."""
        return await commands.command("pause", {"mode": mode})

    @router.post("/resume", response_model=AdminAnswer)
    async def resume() -> Any:
        """Resume generation after a pause."""
        return await commands.command("resume", {})

    @router.post("/load", response_model=LoadAnswer)
    async def load(request: LoadWeights) -> Any:
        """Load another checkpoint of the served model from a directory of the server, as a new
        policy version. Requests continue meanwhile."""
        return await commands.command("load", request.model_dump(exclude_none=True))

    @router.get("/versions", response_model=VersionsAnswer)
    async def versions() -> Any:
        """Which policy version each replica serves."""
        return await commands.command("versions", {})

    return router


async def _answer_error(request: Request, error: Exception) -> Response:
    # Not in `OpenAIErrors`: the application's handler for all exceptions would come before it.
    if isinstance(error, RefusedError):
        refusal = error.refusal
        error = HttpError(refusal.status, refusal.message, code=refusal.code)
    assert isinstance(error, HttpError)
    return error.response()
