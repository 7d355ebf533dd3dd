"""The messages between the endpoint's process and the controller, and the endpoint's end of their
channel.

The endpoint's process tokenizes, detokenizes and serves HTTP; the controller's process has the
router and the sessions. Requests and commands of clients are calls to the controller, which sends
back the progress and the end of each call. Calls are gathered on the HTTP server's thread; a batch
from the controller may arrive on any thread, and reaches the HTTP server's thread in one callback.

Invariants: a request that is submitted and not aborted has exactly one end, and a command exactly
one answer or error, also when the controller is lost (it has delivered nothing for a while, not
even the system's status), when the endpoint has failed, and when the link is closed. An aborted or
ended request gets no further messages. A problem leased for a caller who is gone is given back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, Literal

from torchtitan_rl.channel import Abort, Call, CallId, End, Outbox
from torchtitan_rl.errors import EndpointLostError, one_line
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.middleware import current_run
from torchtitan_rl.types import Completion, GenerationRequest, Progress

logger = logging.getLogger(__name__)

CommandName = Literal[
    "session.open",  # {"session_id"?} -> {"session_id"}
    "session.close",  # {"session_id", "reward"?} -> its final report, with episodes
    "session.reward_branch",  # {"session_id", "response_id", "choice"?, "reward"} -> as for read
    "session.read",  # {"session_id"} -> its state and counts
    "problem.lease",  # {"problem_id"?, "worker"?, "wait_s"?} -> the lease; {} if no problem waits
    "problem.heartbeat",  # {"session_id"}
    "problem.return",  # {"session_id", "outcome": "done", "failed" or "unused", "cause"}
    "pause",  # {"mode"}
    "resume",
    "load",  # {"path", "version"?, "mode"} -> {"version", "replicas", "lost", "stall_s"}
    "tenant.open",  # {"name", "owner", "policy", "max_model_len", LoraConfig's} -> the lease
    "tenant.send",  # {"name", "lease", "number", "messages": bytes}
    "tenant.receive",  # {"name", "lease", "after"} -> {"number", "messages": bytes}
    "tenant.upload",  # {"name", "lease", "version", "offset", "part": bytes}
    "tenant.stage",  # {"name", "lease", "version"}
    "tenant.close",  # {"name", "lease"}
    "repeat",  # {"key"} -> {"run", "request_id"} of a run of a lost process; {} if there is none
    "versions",  # -> {"newest": int, "replicas": {name: version}, "states": {name: state}}
]

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Answers commands of one name: takes the arguments, returns the answer's body, and may raise
`RefusedError`."""


def handler(function: Callable[..., Any]) -> Handler:
    """Make a handler of a function, maybe async, that takes the arguments by name."""

    async def handle(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = function(**arguments)
        found: Mapping[str, Any] = await answer if isawaitable(answer) else answer
        return found

    return handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A client's operation other than generation. It is answered once."""

    name: CommandName
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemStatus:
    """The system's status for ``/health`` and ``/metrics``. The keys of ``gauges`` are Prometheus
    names."""

    is_healthy: bool
    cause: str = ""  # why the system is not healthy
    newest_version: int = 0
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """An event of a client's request that only the endpoint's process sees, to be counted."""

    name: str  # the counter's name, such as "missing_calls"


RequestEnd = End[Completion, RefusedError]
"""Has the whole completion, even if progress was sent before."""

CommandEnd = End[Mapping[str, Any], RefusedError]
"""The result is JSON-able, except for bytes of ``tenant`` commands."""

ToController = Call[GenerationRequest] | Call[Command] | Abort | Counted
"""The call id of a request is the request's own id; that of a command is a number."""

ToEndpoint = Progress | End[Any, RefusedError] | SystemStatus

GAUGE_PREFIX = "torchtitan_rl_"
_COMMAND_S = 120.0
_PAUSE_S = 900.0  # a pause or a load may take minutes
_NUM_LOOKS = 8  # checks without a delivery until the controller counts as lost
_STARTING = SystemStatus(is_healthy=False, cause="the controller has not answered yet")
_LOST = (503, "controller_lost", "the system does not answer")
FAILED = (503, "endpoint_failed", "the endpoint has failed")
_CLOSED = (503, "shutting_down", "the endpoint is shutting down")


class ControllerLink:
    """The HTTP server's end of the channel to the controller.

    A controller that has delivered nothing for ``lost_after_s`` counts as lost until it delivers
    again. Time in which this process is stopped does not count.
    """

    def __init__(self, *, lost_after_s: float = 60.0) -> None:
        self._look_s = lost_after_s / _NUM_LOOKS
        self._outbox: Outbox[ToController] = Outbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Used on the HTTP server's thread only:
        self._pending: set[CallId] = set()
        self._answers: dict[CallId, asyncio.Future[Mapping[str, Any]]] = {}
        self._outputs: asyncio.Queue[Progress | RequestEnd] = asyncio.Queue()
        self._status = _STARTING
        self._gauges: list[Callable[[], Mapping[str, float]]] = []
        self._numbers = itertools.count()
        self._num_looks = 0  # checks since the last delivery
        self._looking: asyncio.TimerHandle | None = None
        self._refuses: tuple[int, str, str] | None = None  # the arguments of a `RefusedError`
        self._is_over = False  # failed or closed: everything is refused from then on

    # On the HTTP server's thread.

    def attach(self) -> None:
        """Begin to watch the controller. Call this first, once, on the HTTP server's event loop."""
        self._loop = asyncio.get_running_loop()
        self._look_for_controller()

    def submit(self, request: GenerationRequest, *, streams: bool = False) -> None:
        """Pass a request on; never raises. `next_outputs` returns its progress and its end."""
        request_id = request.request_id
        self._pending.add(request_id)
        if self._refuses is not None:
            self._outputs.put_nowait(End(call_id=request_id, error=RefusedError(*self._refuses)))
        else:
            run = current_run.get().name
            self._outbox.put(Call(call_id=request_id, payload=request, streams=streams, run=run))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests whose clients are gone. `next_outputs` does not return their ends. Unknown
        and ended ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._pending]
        if known:
            self._pending.difference_update(known)
            self._outbox.put(*(Abort(call_id=request_id) for request_id in known))

    async def next_outputs(self) -> list[Progress | RequestEnd]:
        """Wait until a `Progress` or `RequestEnd` is queued, then return everything queued. Only
        one caller at a time."""
        outputs: list[Progress | RequestEnd] = []
        message = await self._outputs.get()
        while True:
            if isinstance(message, Progress):
                if message.request_id in self._pending:
                    outputs.append(message)
            elif message.call_id in self._pending:
                self._pending.remove(message.call_id)
                outputs.append(message)
            if self._outputs.empty():
                return outputs
            message = self._outputs.get_nowait()

    async def command(
        self, name: CommandName, arguments: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Mapping[str, Any]:
        """Return the controller's answer to a command. If the caller stops waiting, a request for a
        lease is aborted; any other command is completed. Raises RefusedError: the controller
        refused the command, is lost, or did not answer in time."""
        if self._refuses is not None:
            raise RefusedError(*self._refuses)
        if timeout_s is None:
            timeout_s = _PAUSE_S if name in ("pause", "load", "tenant.stage") else _COMMAND_S
        number = next(self._numbers)
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        payload, run = Command(name=name, arguments=arguments), current_run.get().name
        self._outbox.put(Call(call_id=number, payload=payload, run=run))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(answer)
        except BaseException as error:
            if name == "problem.lease":
                self._outbox.put(Abort(call_id=number))
                answer.add_done_callback(self._give_back)
            else:
                self._answers.pop(number, None)
            if not isinstance(error, TimeoutError):
                raise
            message = f"{name} was not answered within {timeout_s:.0f} s"
            raise RefusedError(504, "timeout", message) from error

    def count(self, name: str) -> None:
        """Have the controller count an event under ``name``."""
        self._outbox.put(Counted(name=name))

    def add_gauges(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Add gauges of this process to every later `status`, under the common prefix."""
        self._gauges.append(read)

    def status(self) -> SystemStatus:
        """The last delivered status; unhealthy before the first delivery and while the controller
        is lost."""
        own = {GAUGE_PREFIX + key: value for read in self._gauges for key, value in read().items()}
        status = dataclasses.replace(self._status, gauges={**self._status.gauges, **own})
        if self._refuses is None:
            return status
        return dataclasses.replace(status, is_healthy=False, cause=self._refuses[2])

    def fail(self, cause: str) -> None:
        """Refuse all requests and commands, because the endpoint has failed, and end the channel
        with ``cause``, which clients do not see. No effect after `close`."""
        if not self._is_over:
            logger.error("the endpoint has failed: %s", cause)
            self._end_all(FAILED, f"the endpoint has failed: {cause}")

    def close(self) -> None:
        """Like `fail`, because the HTTP server ends. No effect after `fail`."""
        if not self._is_over:
            self._end_all(_CLOSED, "the HTTP server has ended; see the endpoint's log")

    # The channel calls these, on any thread.

    async def take(self) -> tuple[ToController, ...]:
        """Wait until clients have sent requests or commands, or a status has arrived; return the
        messages for the controller. Only one caller at a time. Raises EndpointLostError: the
        endpoint has failed, or is closed."""
        return await self._outbox.take()

    def deliver(self, messages: tuple[ToEndpoint, ...]) -> None:
        """Pass a batch to the HTTP server's thread, without waiting for it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, messages)

    # Helpers, on the HTTP server's thread.

    def _take(self, messages: tuple[ToEndpoint, ...]) -> None:
        self._num_looks = 0
        if not self._is_over:
            self._refuses = None
        try:
            for message in messages:
                self._take_one(message)
        except Exception as error:  # clients may wait for ends in the rest of the batch
            logger.exception("a delivery could not be taken")
            self.fail(f"a delivery could not be taken: {one_line(error)}")

    def _take_one(self, message: ToEndpoint) -> None:
        match message:
            case Progress() | End(call_id=str()):
                self._outputs.put_nowait(message)
            case End(call_id=number):
                future = self._answers.pop(number, None)
                if future is not None and message.error is not None:
                    future.set_exception(message.error)
                elif future is not None:
                    future.set_result(message.result or {})
            case SystemStatus():
                self._status = message
                self._outbox.put()  # an empty batch tells the controller that the status arrived
            case _:
                raise TypeError(f"not a message to the endpoint: {message!r}")

    def _give_back(self, answer: asyncio.Future[Mapping[str, Any]]) -> None:
        """Give back the leased problem, if ``answer`` has one that its caller did not get."""
        if answer.exception() is None and (lease := answer.result()):
            arguments = {"session_id": lease["session_id"], "outcome": "unused", "cause": ""}
            command = Command(name="problem.return", arguments=arguments)
            self._outbox.put(Call(call_id=next(self._numbers), payload=command))

    def _look_for_controller(self) -> None:
        """Check at intervals; after too many checks without a delivery the controller is lost."""
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(self._look_s, self._look_for_controller)
        self._num_looks += 1
        if self._num_looks > _NUM_LOOKS and self._refuses is None:
            self._fail_all(_LOST)

    def _end_all(self, refusal: tuple[int, str, str], cause: str) -> None:
        """Refuse everything from now on."""
        self._is_over = True
        if self._looking is not None:
            self._looking.cancel()
        self._fail_all(refusal)
        self._outbox.fail(EndpointLostError(cause))

    def _fail_all(self, refusal: tuple[int, str, str]) -> None:
        self._refuses = refusal
        # The callers are gone: if the controller is back, it must end the requests that it has.
        self._outbox.discard(lambda message: isinstance(message, Call))
        self._outbox.put(*(Abort(call_id=request_id) for request_id in self._pending))
        for request_id in self._pending:
            # If a request has already ended, its own end comes first and this one is ignored.
            self._outputs.put_nowait(End(call_id=request_id, error=RefusedError(*refusal)))
        for answer in self._answers.values():
            answer.set_exception(RefusedError(*refusal))
        self._answers.clear()
