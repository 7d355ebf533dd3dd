"""What the endpoint's process and the controller's tell each other over their connection.

The endpoint's process tokenizes, detokenizes and speaks HTTP; the controller's has the router and
the sessions. Requests and commands of clients are the endpoint's calls; the controller tells their
progress and their ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.rpc.messages import Abort, Call, End
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
    """Something else that a client wants, answered once."""

    name: CommandName
    arguments: Mapping[str, Any] = field(default_factory=dict)


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


RequestEnd = End[Completion, Refusal]
"""The completion is whole, whatever progress was delivered before."""

CommandEnd = End[Mapping[str, Any], Refusal]
"""The result is JSON-able."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemStatus:
    """For ``/health`` and ``/metrics``. ``gauges`` are named as Prometheus wants them."""

    is_healthy: bool
    cause: str = ""  # where it is not
    newest_version: int = 0
    gauges: Mapping[str, float] = field(default_factory=dict)


ToController = Call[EndpointRequest] | Call[Command] | Abort
"""Requests are called by their own ids, commands by numbers."""

ToEndpoint = Progress | End[Any, Refusal] | SystemStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What became of requests: progress first, then the ends."""

    progress: tuple[Progress, ...] = ()
    ends: tuple[RequestEnd, ...] = ()


class Endpoint(Protocol):
    """The endpoint's process, as the controller sees it."""

    @property
    def base_url(self) -> str:
        """Such as ``http://127.0.0.1:8000/v1``."""
        ...

    async def poll(self) -> tuple[ToController, ...]:
        """Returns when there is something, or with nothing after about a second.

        Raises:
            EndpointLostError: the endpoint's process is gone.
        """
        ...

    async def deliver(self, messages: tuple[ToEndpoint, ...]) -> None: ...

    async def drain(self, grace_s: float) -> None:
        """Take no new connection; requests that run may end within ``grace_s``, while polls and
        deliveries go on. Then all are refused."""
        ...

    async def close(self) -> None: ...
