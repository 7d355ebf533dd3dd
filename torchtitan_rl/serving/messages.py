"""The messages between the endpoint's process and the controller's.

The endpoint's process tokenizes, detokenizes and serves HTTP; the controller's has the router and
the sessions. Requests and commands of clients are calls of the endpoint; the controller answers
with their progress and their ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torchtitan_rl.channel import Abort, Call, End, Submission
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.types import Completion, Progress

CommandName = Literal[
    "session.open",  # {"session_id"?} -> {"session_id"}
    "session.close",  # {"session_id", "reward"?} -> what the session came to, episodes included
    "session.reward_branch",  # {"session_id", "response_id", "choice"?, "reward"} -> as read
    "session.read",  # {"session_id"} -> its state and counts
    "problem.lease",  # {"problem_id"?, "worker"?, "wait_s"?} -> the lease; {} without a problem
    "problem.heartbeat",  # {"session_id"}
    "problem.return",  # {"session_id", "outcome": "done", "failed" or "unused", "cause"}
    "pause",  # {"mode"}
    "resume",
    "load",  # {"path", "version"?, "mode"} -> {"version", "replicas", "lost", "stall_s"}
    "versions",  # -> {"newest": int, "replicas": {name: version}, "states": {name: state}}
]

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Answers commands of one name, from arguments to the body; it may raise `RefusedError`."""

GAUGE_PREFIX = "torchtitan_rl_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Any other operation for a client, answered once."""

    name: CommandName
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why something failed, for the client: an HTTP status and a message without internals."""

    status: int
    message: str
    code: str  # of the OpenAI error object, such as "session_closed"


class RefusedError(TorchtitanRLError):
    """Raised where the client is to get a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.message)


def refused(status: int, code: str, message: str) -> RefusedError:
    return RefusedError(Refusal(status=status, message=message, code=code))


RequestEnd = End[Completion, Refusal]
"""The completion is whole, also after progress."""

CommandEnd = End[Mapping[str, Any], Refusal]
"""The result is JSON-able."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemStatus:
    """For ``/health`` and ``/metrics``. ``gauges`` have Prometheus names."""

    is_healthy: bool
    cause: str = ""  # where it is not
    newest_version: int = 0
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Something happened to a client's request that only the endpoint's process sees."""

    name: str  # of a counter, such as "missing_calls"


ToController = Call[Submission] | Call[Command] | Abort | Counted
"""Requests are called by their own ids, commands by numbers."""

ToEndpoint = Progress | End[Any, Refusal] | SystemStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Progress and ends of requests; the progress comes first."""

    progress: tuple[Progress, ...] = ()
    ends: tuple[RequestEnd, ...] = ()


class Endpoint(Protocol):
    """The endpoint's process, for the controller."""

    @property
    def base_url(self) -> str:
        """Such as ``http://127.0.0.1:8000/v1``."""
        ...

    async def poll(self) -> tuple[ToController, ...]:
        """The next messages; none where there are none within about a second.

        Raises:
            EndpointLostError: the endpoint's process is gone.
        """
        ...

    async def deliver(self, messages: tuple[ToEndpoint, ...]) -> None: ...

    async def drain(self, grace_s: float) -> None:
        """Accept no new connection; running requests may end within ``grace_s``, while polls and
        deliveries continue. Then all are refused."""
        ...

    async def close(self) -> None: ...
