"""The endpoint's own routes: sessions, problems that workers lease in a training run, and
administration. Each request becomes one command to the controller.

A leased problem is a session: the session's id also identifies the lease. The routes are ordinary
FastAPI routes, listed in the OpenAPI document together with vLLM's routes. Clients' input is
checked here, and only here. A refusal by the controller becomes an error with the refusal's status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from torchtitan_rl.generation.commands import PauseMode
from torchtitan_rl.routing.weights import SyncMode
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import CommandName
from torchtitan_rl.serving.middleware import (
    ADMIN_PREFIX,
    PROBLEMS_PREFIX,
    SESSIONS_PREFIX,
    checked_session_id,
    until_gone,
)

MAX_REWARD = 1e30  # JSON numbers may exceed a float32
MAX_WAIT_S = 60.0  # longest time that a worker may wait for a problem
MAX_VERSION = 2**31 - 1


class Commands(Protocol):
    """Carries commands to the controller, as `ControllerLink` does."""

    async def command(self, name: CommandName, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the controller's answer, or raise RefusedError."""


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(BaseModel):
    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 409, 413, 422, 503)
}


def add_routes(app: FastAPI, commands: Commands) -> None:
    """Add the routes to ``app`` and its OpenAPI document."""
    app.add_exception_handler(RefusedError, refused)
    for routes in (_sessions, _problems, _admin):
        app.include_router(routes(commands))
    app.openapi_schema = None  # the OpenAPI document may already have been made


async def refused(_: Request, error: Any) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


SessionId = Annotated[str, AfterValidator(checked_session_id)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenSession(_Body):
    session_id: SessionId | None = Field(default=None, description="A new one when left out.")
    problem_id: str | None = Field(
        default=None,
        description="In a training run: lease this problem, which has to wait for a worker.",
    )


class Reward(_Body):
    reward: float = Field(ge=-MAX_REWARD, le=MAX_REWARD)
    return_episodes: bool = False
    response_id: str | None = Field(
        default=None,
        max_length=256,
        description="Give the reward to the branch with this response; the session stays open.",
    )
    choice: int | None = Field(default=None, ge=0, description="One choice of that response.")


class LeaseProblem(_Body):
    problem_id: str | None = Field(default=None, description="Any problem when left out.")
    worker: str = Field(
        default="", max_length=128, description="A name for logs and error messages."
    )
    wait_s: float = Field(
        default=0.0, ge=0.0, le=MAX_WAIT_S, description="How long to wait for one."
    )


class ReturnLease(_Body):
    outcome: Literal["done", "failed"] = Field(
        description="`done`: the reward comes later. `failed`: another worker may have it."
    )
    cause: str = Field(default="", max_length=1000)


class AdminAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")


class SessionAnswer(AdminAnswer):
    """A session's state; its counts are further fields."""

    session_id: str


class LeaseAnswer(BaseModel):
    """Each request with the API key `KEY:session_id`, and each heartbeat, extends the lease: it
    then lasts `lease_s` seconds. The session's reward ends the lease."""

    session_id: str
    model: str
    lease_s: float
    problem_id: str
    data: dict[str, Any]


class LoadWeights(_Body):
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


class LoadAnswer(AdminAnswer):
    """The new version, the version of each replica, the replicas that were lost during the load,
    and the longest time without decoding."""

    version: int
    replicas: dict[str, int]
    lost: list[str]
    stall_s: float


class VersionsAnswer(AdminAnswer):
    """The newest policy version, and for each replica the one it serves and its state."""

    newest: int
    replicas: dict[str, int]
    states: dict[str, str]


def _sessions(commands: Commands) -> APIRouter:
    # Ids have slashes ("12/r0"): the id is the path up to its last word.
    router = APIRouter(prefix=SESSIONS_PREFIX, tags=["sessions"], responses=ERRORS)

    @router.post("", response_model=SessionAnswer)
    async def open_session(request: OpenSession | None = None) -> Any:
        """Open a session; requests that name it are recorded, token for token."""
        arguments = {} if request is None else request.model_dump(exclude_none=True)
        if "problem_id" not in arguments:
            return await commands.command("session.open", arguments)
        if "session_id" in arguments:
            raise RefusedError(400, "invalid_request", "a problem's session has an id of its own")
        if lease := await commands.command("problem.lease", arguments):
            return lease
        message = f"problem {arguments['problem_id']!r} does not wait for a worker"
        raise RefusedError(404, "problem_not_found", message)

    @router.post("/{session_id:path}/reward", response_model=SessionAnswer)
    async def reward_session(session_id: SessionId, request: Reward) -> Any:
        """Close a session with its reward; `return_episodes` returns its episodes. With a
        `response_id` only the branch with that response gets the reward."""
        arguments: dict[str, Any] = {"session_id": session_id, "reward": request.reward}
        command: CommandName = "session.close"
        if request.response_id is not None:
            command = "session.reward_branch"
            arguments |= {"response_id": request.response_id, "choice": request.choice}
        elif request.choice is not None:
            why = "choice is one of a response: give response_id"
            raise RefusedError(400, "invalid_request", why)
        answer = dict(await commands.command(command, arguments))
        if not request.return_episodes:
            answer.pop("episodes", None)
        return answer

    @router.post("/{session_id:path}/heartbeat", response_model=SessionAnswer)
    async def heartbeat(session_id: SessionId) -> Any:
        """Keep a lease."""
        return await commands.command("problem.heartbeat", {"session_id": session_id})

    @router.post("/{session_id:path}/return", response_model=SessionAnswer)
    async def return_lease(session_id: SessionId, request: ReturnLease) -> Any:
        """End a lease before its session has a reward."""
        arguments = {"session_id": session_id, **request.model_dump()}
        return await commands.command("problem.return", arguments)

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


def _problems(commands: Commands) -> APIRouter:
    router = APIRouter(prefix=PROBLEMS_PREFIX, tags=["problems"], responses=ERRORS)

    @router.post("/lease", response_model=LeaseAnswer, responses={204: {"model": None}})
    async def lease_problem(client: Request, request: LeaseProblem | None = None) -> Any:
        """Lease a problem of the training run; 204 where none waits."""
        arguments = (request or LeaseProblem()).model_dump(exclude_none=True)
        lease = await _lease(commands, arguments, client)
        return lease or Response(status_code=204)

    return router


async def _lease(
    commands: Commands, arguments: Mapping[str, Any], client: Request
) -> Mapping[str, Any]:
    """Lease a problem; empty if none waits. If the client disconnects first, the lease is given
    back, and RefusedError is raised."""
    leases = asyncio.ensure_future(commands.command("problem.lease", arguments))
    leaves = asyncio.ensure_future(until_gone(client.receive)())
    try:
        await asyncio.wait({leases, leaves}, return_when=asyncio.FIRST_COMPLETED)
        if not leaves.done():
            return leases.result()
        if leases.done() and (lease := leases.result()):
            unused = {"session_id": lease["session_id"], "outcome": "unused", "cause": ""}
            await commands.command("problem.return", unused)
        raise RefusedError(499, "client_gone", "the client has left")
    finally:
        leases.cancel()
        leaves.cancel()


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
