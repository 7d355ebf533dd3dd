"""The endpoint's own routes: each is one command to the controller.

Those of sessions are in `session_routes`. They are ordinary FastAPI routes, listed in the OpenAPI
document with vLLM's. Clients' input is checked here, and only here; a refusal of the controller
becomes an error with its status.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.routing.weight_sync import SyncMode
from torchtitan_rl.serving.auth import ADMIN_PREFIX
from torchtitan_rl.serving.errors import HttpError
from torchtitan_rl.serving.messages import RefusedError
from torchtitan_rl.serving.route_parts import ERRORS, Commands
from torchtitan_rl.serving.session_routes import problem_routes, session_routes

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
