"""What the endpoint's process and the controller's tell each other: one batch each way at a time.

The endpoint's process tokenizes, detokenizes and speaks HTTP; the controller's has the router and
the sessions. The controller polls for what clients want and delivers what has become of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.types import Completion, GenerationRequest, Progress

CommandName = Literal[
    "session.open",  # {"session_id"?} -> {"session_id"}
    "session.close",  # {"session_id", "reward"?} -> what the session came to, episodes included
    "session.read",  # {"session_id"} -> its state and counts
    "pause",  # {"mode"}
    "resume",
    "versions",  # -> {"newest": int, "replicas": {name: version}, "states": {name: state}}
]

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Answers commands of one name, from arguments to the body; it may raise `RefusedError`."""

GAUGE_PREFIX = "torchtitan_rl_"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRequest:
    """One completion that a client wants. ``streams``: it is to be told of the progress."""

    request: GenerationRequest
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Something else that a client wants, answered once, by ``command_id``."""

    command_id: str
    name: CommandName
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FromEndpoint:
    """What clients want since the last poll; all of it may be empty."""

    requests: tuple[EndpointRequest, ...] = ()
    aborts: tuple[str, ...] = ()  # request ids that nobody waits for any more
    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why something failed, for the client: an HTTP status and a message without internals."""

    status: int
    message: str
    code: str  # of the OpenAI error object, such as "session_closed"


class RefusedError(TorchtitanRLError):
    """A refusal on its way to the client."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """The end of a request: exactly one of the two. The completion is whole, whatever progress
    was delivered before."""

    request_id: str
    completion: Completion | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAnswer:
    """``body`` is JSON-able; with a ``refusal`` it is empty."""

    command_id: str
    body: Mapping[str, Any] = field(default_factory=dict)
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemStatus:
    """For ``/health`` and ``/metrics``. ``gauges`` are named as Prometheus wants them."""

    is_healthy: bool
    cause: str = ""  # where it is not
    newest_version: int = 0
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToEndpoint:
    """In this order: progress, ends, answers."""

    progress: tuple[Progress, ...] = ()
    ends: tuple[RequestEnd, ...] = ()
    answers: tuple[CommandAnswer, ...] = ()
    status: SystemStatus | None = None  # None: as before


class Endpoint(Protocol):
    """The endpoint's process, as the controller sees it."""

    @property
    def base_url(self) -> str:
        """Such as ``http://127.0.0.1:8000/v1``."""
        ...

    async def poll(self) -> FromEndpoint:
        """Returns when there is something, or with nothing after about a second.

        Raises:
            EndpointLostError: the endpoint's process is gone.
        """
        ...

    async def deliver(self, batch: ToEndpoint) -> None: ...

    async def drain(self, grace_s: float) -> None:
        """Take no new connection; requests that run may end within ``grace_s``, while polls and
        deliveries go on. Then all are refused."""
        ...

    async def close(self) -> None: ...
