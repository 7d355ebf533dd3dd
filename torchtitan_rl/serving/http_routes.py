"""The routes that are ours: sessions, and administration. Each is one command to the controller.

They are ordinary FastAPI routes, so they are in the OpenAPI document beside vLLM's. What the
controller refuses becomes an error with the refusal's status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field

from torchtitan_rl.serving.http_auth import checked_session_id
from torchtitan_rl.serving.http_errors import HttpError, error_body
from torchtitan_rl.serving.messages import CommandName, RefusedError


class Commands(Protocol):
    """Who carries commands to the controller: `ControllerLink`, or a test's."""

    async def command(self, name: CommandName, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises:
        RefusedError: with what the client is to be told.
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

    session_id: str | None = Field(None, max_length=128, description="A new one when left out.")


class Reward(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reward: float = Field(allow_inf_nan=False)
    return_episodes: bool = False


class SessionAnswer(BaseModel):
    """What the controller says of a session; its counts come as further fields."""

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


SessionId = Annotated[str, PathParameter(min_length=1, max_length=128)]
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 409, 413, 422, 503)
}


def add_routes(app: FastAPI, commands: Commands) -> None:
    """Include the routes in ``app`` (and its OpenAPI document)."""
    app.add_exception_handler(HttpError, _answer_error)
    app.add_exception_handler(RefusedError, _answer_error)
    app.include_router(_sessions(commands))
    app.include_router(_admin(commands))
    app.openapi_schema = None  # the document may have been made before


def _sessions(commands: Commands) -> APIRouter:
    # Ids have slashes ("12/r0"), so their part of the path is everything up to the last word.
    router = APIRouter(prefix="/v1/sessions", tags=["sessions"], responses=_ERRORS)

    @router.post("", response_model=SessionAnswer)
    async def open_session(request: OpenSession | None = None) -> Any:
        """Open a session; requests that name it are recorded, token for token."""
        arguments: dict[str, Any] = {}
        if request is not None and request.session_id is not None:
            arguments["session_id"] = checked_session_id(request.session_id)
        return await commands.command("session.open", arguments)

    @router.post("/{session_id:path}/reward", response_model=SessionAnswer)
    async def reward_session(session_id: SessionId, request: Reward) -> Any:
        """Close a session with its reward; its episodes come back if they are asked for."""
        arguments: dict[str, Any] = {
            "session_id": checked_session_id(session_id),
            "reward": request.reward,
        }
        answer = dict(await commands.command("session.close", arguments))
        if not request.return_episodes:
            answer.pop("episodes", None)
        return answer

    @router.delete("/{session_id:path}", response_model=SessionAnswer)
    async def close_session(session_id: SessionId) -> Any:
        """Close a session without a reward."""
        arguments = {"session_id": checked_session_id(session_id)}
        answer = dict(await commands.command("session.close", arguments))
        answer.pop("episodes", None)
        return answer

    @router.get("/{session_id:path}", response_model=SessionAnswer)
    async def read_session(session_id: SessionId) -> Any:
        """A session's state and counts."""
        return await commands.command(
            "session.read", {"session_id": checked_session_id(session_id)}
        )

    return router


def _admin(commands: Commands) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["admin"], responses={**_ERRORS, 403: _ERRORS[401]})

    @router.post("/pause", response_model=AdminAnswer)
    async def pause(mode: Annotated[Literal["keep", "abort", "wait"], Query()] = "keep") -> Any:
        """Pause generation: freeze what runs, cut it to be resumed, or wait for its end."""
        return await commands.command("pause", {"mode": mode})

    @router.post("/resume", response_model=AdminAnswer)
    async def resume() -> Any:
        """Go on after a pause."""
        return await commands.command("resume", {})

    @router.get("/versions", response_model=VersionsAnswer)
    async def versions() -> Any:
        """Which policy version each replica serves."""
        return await commands.command("versions", {})

    return router


async def _answer_error(request: Request, error: Exception) -> Response:
    # Here and not in the shell: the app's handler for all exceptions would make it a 500 first.
    if isinstance(error, RefusedError):
        refusal = error.refusal
        error = HttpError(refusal.status, refusal.message, code=refusal.code)
    assert isinstance(error, HttpError)
    body = error_body(error.status, error.message, code=error.code, param=error.param)
    return Response(body, status_code=error.status, media_type="application/json")
