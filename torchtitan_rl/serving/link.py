"""The endpoint process's end of its connection to the controller.

Clients' requests and commands are gathered on the HTTP server's thread until the controller polls;
a delivery of the controller, on any thread, reaches that thread in one callback per batch.

Invariants: a request that is submitted and not aborted has exactly one end, and a command exactly
one answer or error, also where the controller is lost (it has not polled for a while), the endpoint
has failed or the link is closed. An aborted or ended request gets no further messages. A problem
that is leased for a caller who is gone is given back. The controller's next poll raises a failure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchtitan_rl.channel import Abort, Call, CallId, End, Outbox, Submission
from torchtitan_rl.errors import EndpointLostError, one_line
from torchtitan_rl.serving.messages import (
    GAUGE_PREFIX,
    Command,
    CommandEnd,
    CommandName,
    Counted,
    Outputs,
    Refusal,
    RefusedError,
    RequestEnd,
    SystemStatus,
    ToController,
    ToEndpoint,
)
from torchtitan_rl.types import Progress

logger = logging.getLogger(__name__)

_POLL_S = 1.0  # a poll without messages returns after this time
_COMMAND_S = 120.0
_PAUSE_S = 900.0
_STARTING = SystemStatus(is_healthy=False, cause="the controller has not answered yet")
_LOST = Refusal(status=503, message="the system does not answer", code="controller_lost")
FAILED = Refusal(status=503, message="the endpoint has failed", code="endpoint_failed")
_CLOSED = Refusal(status=503, message="the endpoint is shutting down", code="shutting_down")


class ControllerLink:
    """Connects the HTTP server's event loop with a controller that polls and delivers.

    ``lost_after_s``: a controller that has not polled for this time is lost until it polls again.
    """

    def __init__(
        self, *, lost_after_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._outbox: Outbox[ToController] = Outbox()
        # Shared by both threads, under the lock:
        self._lock = threading.Lock()
        self._last_poll_s = clock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Of the HTTP server's thread alone:
        self._pending: set[CallId] = set()
        self._answers: dict[CallId, asyncio.Future[Mapping[str, Any]]] = {}
        self._outputs: Outbox[Progress | RequestEnd] = Outbox()
        self._status = _STARTING
        self._gauges: list[Callable[[], Mapping[str, float]]] = []
        self._numbers = itertools.count()
        self._watch: asyncio.TimerHandle | None = None
        self._refuses: Refusal | None = None
        self._is_over = False  # failed or closed: it refuses everything for good

    # On the HTTP server's thread.

    def attach(self) -> None:
        """Called once, before all else, on the event loop that uses this side."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._look_for_controller()

    def submit(self, request: Submission) -> None:
        """Pass a request on; never raises. `next_outputs` gives its progress and its end."""
        request_id = request.request.request_id
        self._pending.add(request_id)
        if self._refuses is not None:
            self._outputs.put(End(call_id=request_id, error=self._refuses))
        else:
            self._outbox.put(Call(call_id=request_id, payload=request))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests whose clients are gone; `next_outputs` does not give their ends. Unknown
        and ended ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._pending]
        if not known:
            return
        self._pending.difference_update(known)
        self._outbox.put(*(Abort(call_id=request_id) for request_id in known))

    async def next_outputs(self) -> Outputs:
        """Wait for progress or ends, and take all there is. For one caller at a time."""
        progress: list[Progress] = []
        ends: list[RequestEnd] = []
        for message in await self._outputs.take():
            if isinstance(message, Progress):
                if message.request_id in self._pending:
                    progress.append(message)
            elif message.call_id in self._pending:
                self._pending.remove(message.call_id)
                ends.append(message)
        return Outputs(progress=tuple(progress), ends=tuple(ends))

    async def command(
        self, name: CommandName, arguments: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Mapping[str, Any]:
        """The controller's answer. A pause or a load may take minutes; other commands end soon.

        A lease is aborted where its caller no longer waits; any other command is completed.

        Raises:
            RefusedError: the controller refused it, is lost, or did not answer in time.
        """
        if self._refuses is not None:
            raise RefusedError(self._refuses)
        if timeout_s is None:
            timeout_s = _PAUSE_S if name in ("pause", "load") else _COMMAND_S
        number = next(self._numbers)
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._outbox.put(Call(call_id=number, payload=Command(name=name, arguments=arguments)))
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
            raise RefusedError(Refusal(status=504, message=message, code="timeout")) from error

    def count(self, name: str) -> None:
        """Have the controller count something that happened to a request."""
        self._outbox.put(Counted(name=name))

    def add_gauges(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Add gauges of this process to every `status`, under the common prefix."""
        self._gauges.append(read)

    def status(self) -> SystemStatus:
        """As last delivered; unhealthy before the first time and where the controller is lost."""
        own = {GAUGE_PREFIX + key: value for read in self._gauges for key, value in read().items()}
        status = dataclasses.replace(self._status, gauges={**self._status.gauges, **own})
        if self._refuses is None:
            return status
        return dataclasses.replace(status, is_healthy=False, cause=self._refuses.message)

    def fail(self, cause: str) -> None:
        """The endpoint has failed: refuse all requests and commands, and fail the controller's
        next poll with ``cause``, which clients do not get. No effect after `close`."""
        if self._is_over:
            return
        logger.error("the endpoint has failed: %s", cause)
        self._end_all(FAILED)
        self._outbox.fail(EndpointLostError(f"the endpoint has failed: {cause}"))

    def close(self) -> None:
        """Refuse all waiting and all later requests and commands. Again: no effect."""
        self._end_all(_CLOSED)

    # From the controller's calls, on any thread.

    async def poll(self) -> tuple[ToController, ...]:
        """Clients' requests and commands; waits about a second for them. One caller at a time.

        Raises:
            EndpointLostError: the endpoint has failed.
        """
        self._note_poll()
        messages = await self._outbox.take(_POLL_S)
        self._note_poll()
        return messages

    def deliver(self, messages: tuple[ToEndpoint, ...]) -> None:
        """Pass a batch to the HTTP server's thread, without waiting for it."""
        with self._lock:
            loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._take, messages)

    def _note_poll(self) -> None:
        with self._lock:
            self._last_poll_s = self._clock()

    # Helpers, on the HTTP server's thread.

    def _take(self, messages: tuple[ToEndpoint, ...]) -> None:
        try:
            self._take_all(messages)
        except Exception as error:  # the lost batch may have ends that clients wait for
            logger.exception("a delivery could not be taken")
            self.fail(f"a delivery could not be taken: {one_line(error)}")

    def _take_all(self, messages: tuple[ToEndpoint, ...]) -> None:
        outputs: list[Progress | RequestEnd] = []
        for message in messages:
            match message:
                case Progress() | End(call_id=str()):
                    outputs.append(message)
                case End(call_id=number):
                    self._answer(number, message)
                case SystemStatus():
                    self._status = message
                case _:
                    raise TypeError(f"not a message to the endpoint: {message!r}")
        if outputs:
            self._outputs.put(*outputs)

    def _answer(self, number: CallId, end: CommandEnd) -> None:
        future = self._answers.pop(number, None)
        if future is None:
            return
        if end.error is not None:
            future.set_exception(RefusedError(end.error))
        else:
            future.set_result(end.result or {})

    def _give_back(self, answer: asyncio.Future[Mapping[str, Any]]) -> None:
        """The problem of a lease, where there is one, which its caller did not get."""
        if answer.exception() is None and (lease := answer.result()):
            arguments = {"session_id": lease["session_id"], "outcome": "unused", "cause": ""}
            command = Command(name="problem.return", arguments=arguments)
            self._outbox.put(Call(call_id=next(self._numbers), payload=command))

    def _look_for_controller(self) -> None:
        """Check regularly that it still polls."""
        self._watch = asyncio.get_running_loop().call_later(
            self._lost_after_s / 8, self._look_for_controller
        )
        with self._lock:
            silent_s = self._clock() - self._last_poll_s
        if silent_s <= self._lost_after_s:
            self._refuses = None
        elif self._refuses is None:
            self._fail_all(_LOST)

    def _end_all(self, refusal: Refusal) -> None:
        """Refuse everything from now on."""
        if self._watch is not None:
            self._watch.cancel()
        if not self._is_over:
            self._is_over = True
            self._fail_all(refusal)

    def _fail_all(self, refusal: Refusal) -> None:
        self._refuses = refusal
        # The callers are gone; a controller that polls again ends the requests that it has.
        self._outbox.discard(lambda message: isinstance(message, Call))
        self._outbox.put(*(Abort(call_id=request_id) for request_id in self._pending))
        # Where a request has ended already, that end comes first and this one is ignored.
        self._outputs.put(*(End(call_id=name, error=refusal) for name in self._pending))
        for answer in self._answers.values():
            answer.set_exception(RefusedError(refusal))
        self._answers.clear()
