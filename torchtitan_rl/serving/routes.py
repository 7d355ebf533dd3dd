"""The endpoint's routes for sessions and administration: each is one command to the controller.

They are ordinary FastAPI routes, listed in the OpenAPI document with vLLM's. Clients' input is
checked here, and only here; a refusal of the controller becomes an error with its status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.serving.admission import SESSIONS_PREFIX
from torchtitan_rl.serving.auth import ADMIN_PREFIX, checked_session_id
from torchtitan_rl.serving.errors import HttpError
from torchtitan_rl.serving.messages import CommandName, RefusedError

MAX_REWARD = 1e30  # JSON numbers may exceed a float32

SessionId = Annotated[str, AfterValidator(checked_session_id)]


class Commands(Protocol):
    """Carries commands to the controller, as `ControllerLink` does."""

    async def command(self, name: CommandName, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises:
        RefusedError: the controller refused it.
        """
        ...


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(BaseModel):
    error: ErrorObject


class OpenSession(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session_id: SessionId | None = Field(None, description="A new one when left out.")


class Reward(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reward: float = Field(ge=-MAX_REWARD, le=MAX_REWARD)
    return_episodes: bool = False


class SessionAnswer(BaseModel):
    """A session's state; its counts are further fields."""

    model_config = ConfigDict(extra="allow")

    session_id: str


class AdminAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")


class VersionsAnswer(BaseModel):
    """The newest policy version, and for each replica the one it serves and its state."""

    model_config = ConfigDict(extra="allow")

    newest: int
    replicas: dict[str, int]
    states: dict[str, str]


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 409, 413, 422, 503)
}


def add_routes(app: FastAPI, commands: Commands) -> None:
    """Add the routes to ``app`` and its OpenAPI document."""
    app.add_exception_handler(HttpError, _answer_error)
    app.add_exception_handler(RefusedError, _answer_error)
    app.include_router(_sessions(commands))
    app.include_router(_admin(commands))
    app.openapi_schema = None  # the document may have been made before


def _sessions(commands: Commands) -> APIRouter:
    # Ids have slashes ("12/r0"), so their part of the path is everything up to the last word.
    router = APIRouter(prefix=SESSIONS_PREFIX, tags=["sessions"], responses=_ERRORS)

    @router.post("", response_model=SessionAnswer)
    async def open_session(request: OpenSession | None = None) -> Any:
        """Open a session; requests that name it are recorded, token for token."""
        arguments = {} if request is None else request.model_dump(exclude_none=True)
        return await commands.command("session.open", arguments)

    @router.post("/{session_id:path}/reward", response_model=SessionAnswer)
    async def reward_session(session_id: SessionId, request: Reward) -> Any:
        """Close a session with its reward; `return_episodes` returns its episodes."""
        arguments = {"session_id": session_id, "reward": request.reward}
        answer = dict(await commands.command("session.close", arguments))
        if not request.return_episodes:
            answer.pop("episodes", None)
        return answer

    @router.delete("/{session_id:path}", response_model=SessionAnswer)
    async def close_session(session_id: SessionId) -> Any:
        """Close a session without a reward."""
        answer = dict(await commands.command("session.close", {"session_id": session_id}))
        answer.pop("episodes", None)
        return answer

    @router.get("/{session_id:path}", response_model=SessionAnswer)
    async def read_session(session_id: SessionId) -> Any:
        """A session's state and counts."""
        return await commands.command("session.read", {"session_id": session_id})

    return router


def _admin(commands: Commands) -> APIRouter:
    router = APIRouter(
        prefix=ADMIN_PREFIX, tags=["admin"], responses={**_ERRORS, 403: _ERRORS[401]}
    )

    @router.post("/pause", response_model=AdminAnswer)
    async def pause(mode: Annotated[PauseMode, Query()] = "keep") -> Any:
        """Pause generation: keep running requests frozen, abort them to resume later, or let them
        end."""
        return await commands.command("pause", {"mode": mode})

    @router.post("/resume", response_model=AdminAnswer)
    async def resume() -> Any:
        """Resume generation after a pause."""
        return await commands.command("resume", {})

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
