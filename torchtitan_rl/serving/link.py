"""The endpoint process's end of the line to the controller.

What clients want is gathered on the HTTP server's thread until the controller polls for it; what
the controller delivers is handed to that thread in one hop per batch, from whatever thread it came
in on.

Invariants: a request that is submitted and not aborted has exactly one end, and a command exactly
one answer or error, also where the controller is lost (it has not polled for a while), the endpoint
has failed or the link is closed; of an aborted or ended request nothing more is heard. Of a failure
the controller hears by its next poll.
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

from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.messages import (
    GAUGE_PREFIX,
    Command,
    CommandAnswer,
    CommandName,
    EndpointRequest,
    FromEndpoint,
    Refusal,
    RefusedError,
    RequestEnd,
    SystemStatus,
    ToEndpoint,
)
from torchtitan_rl.types import Progress

logger = logging.getLogger(__name__)

_POLL_S = 1.0  # a poll without anything to say returns after so long
_COMMAND_S = 120.0
_PAUSE_S = 900.0
_STARTING = SystemStatus(is_healthy=False, cause="the controller has not answered yet")
_LOST = Refusal(status=503, message="the system does not answer", code="controller_lost")
FAILED = Refusal(status=503, message="the endpoint has failed", code="endpoint_failed")
_CLOSED = Refusal(status=503, message="the endpoint is shutting down", code="shutting_down")


class ControllerLink:
    """Between the HTTP server's event loop and a controller that polls and delivers.

    ``lost_after_s``: a controller that has not polled for so long is lost, until it polls again.
    """

    def __init__(
        self, *, lost_after_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lost_after_s = lost_after_s
        self._clock = clock
        # Shared by both threads, under the lock:
        self._lock = threading.Lock()
        self._requests: list[EndpointRequest] = []
        self._aborts: list[str] = []
        self._commands: list[Command] = []
        self._wake_poller: Callable[[], None] | None = None
        self._last_poll_s = clock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure = ""
        # Of the HTTP server's thread alone:
        self._pending: set[str] = set()
        self._answers: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self._progress: list[Progress] = []
        self._ends: list[RequestEnd] = []
        self._has_outputs = asyncio.Event()
        self._status = _STARTING
        self._gauges: list[Callable[[], Mapping[str, float]]] = []
        self._numbers = itertools.count()
        self._watch: asyncio.TimerHandle | None = None
        self._refuses: Refusal | None = None
        self._is_over = False  # what is refused stays refused

    # On the HTTP server's thread.

    def attach(self) -> None:
        """Called once, first, on the event loop that uses this side."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._look_for_controller()

    def submit(self, request: EndpointRequest) -> None:
        """Pass a request on; it never raises. What becomes of it comes with `next_outputs`."""
        request_id = request.request.request_id
        self._pending.add(request_id)
        if self._refuses is not None:
            self._end(RequestEnd(request_id=request_id, refusal=self._refuses))
            return
        with self._lock:
            self._requests.append(request)
        self._wake()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more: they are ended, and have no end here. Unknown and
        ended ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._pending]
        if not known:
            return
        self._pending.difference_update(known)
        self._tell_of_aborts(known)

    async def next_outputs(self) -> ToEndpoint:
        """Wait for progress or ends, and take all there is. For one caller at a time."""
        await self._has_outputs.wait()
        self._has_outputs.clear()
        outputs = ToEndpoint(
            progress=tuple(item for item in self._progress if item.request_id in self._pending),
            ends=tuple(end for end in self._ends if end.request_id in self._pending),
        )
        self._progress.clear()
        self._ends.clear()
        self._pending.difference_update(end.request_id for end in outputs.ends)
        return outputs

    async def command(
        self, name: CommandName, arguments: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Mapping[str, Any]:
        """The controller's answer. A pause may wait for all requests, others end soon.

        Raises:
            RefusedError: the controller refused it, is lost, or did not answer in time.
        """
        if self._refuses is not None:
            raise RefusedError(self._refuses)
        if timeout_s is None:
            timeout_s = _PAUSE_S if name == "pause" else _COMMAND_S
        command = Command(command_id=str(next(self._numbers)), name=name, arguments=arguments)
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[command.command_id] = answer
        with self._lock:
            self._commands.append(command)
        self._wake()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            message = f"{name} was not answered within {timeout_s:.0f} s"
            raise RefusedError(Refusal(status=504, message=message, code="timeout")) from error
        finally:
            del self._answers[command.command_id]

    def add_gauges(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Of this process, to come with every `status`, under the common prefix."""
        self._gauges.append(read)

    def status(self) -> SystemStatus:
        """As last delivered; unhealthy before the first time and where the controller is lost."""
        own = {GAUGE_PREFIX + key: value for read in self._gauges for key, value in read().items()}
        status = dataclasses.replace(self._status, gauges={**self._status.gauges, **own})
        if self._refuses is None:
            return status
        return dataclasses.replace(status, is_healthy=False, cause=self._refuses.message)

    def fail(self, cause: str) -> None:
        """The endpoint cannot go on: fail all that waits and all that comes, and tell the
        controller, which gets ``cause``; clients do not. Nothing happens once it is closed."""
        if self._is_over:
            return
        logger.error("the endpoint has failed: %s", cause)
        with self._lock:
            self._failure = cause
        self._end_all(FAILED)
        self._wake()

    def close(self) -> None:
        """Fail all that waits, and all that comes. Once is enough."""
        self._end_all(_CLOSED)

    # From the controller's calls, on any thread.

    async def poll(self) -> FromEndpoint:
        """What clients want; waits about a second for it. For one caller at a time.

        Raises:
            EndpointLostError: the endpoint has failed.
        """
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._last_poll_s = self._clock()
            if not (self._requests or self._aborts or self._commands or self._failure):

                def wake() -> None:
                    loop.call_soon_threadsafe(_set, woken)

                self._wake_poller = wake
            else:
                woken.set_result(None)
        await asyncio.wait([woken], timeout=_POLL_S)
        with self._lock:
            self._wake_poller = None
            self._last_poll_s = self._clock()
            if self._failure:
                raise EndpointLostError(f"the endpoint has failed: {self._failure}")
            batch = FromEndpoint(
                requests=tuple(self._requests),
                aborts=tuple(self._aborts),
                commands=tuple(self._commands),
            )
            self._requests.clear()
            self._aborts.clear()
            self._commands.clear()
        return batch

    def deliver(self, batch: ToEndpoint) -> None:
        """Hand a batch over to the HTTP server's thread; without waiting for it."""
        with self._lock:
            loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._take, batch)

    # Helpers, on the HTTP server's thread.

    def _wake(self) -> None:
        with self._lock:
            wake, self._wake_poller = self._wake_poller, None
        if wake is not None:
            wake()

    def _tell_of_aborts(self, request_ids: list[str]) -> None:
        with self._lock:
            self._aborts.extend(request_ids)
        self._wake()

    def _take(self, batch: ToEndpoint) -> None:
        try:
            self._take_all(batch)
        except Exception as error:  # the batch is lost, and with it ends that clients wait for
            logger.exception("a delivery could not be taken")
            self.fail(f"a delivery could not be taken: {type(error).__name__}: {error}")

    def _take_all(self, batch: ToEndpoint) -> None:
        if batch.status is not None:
            self._status = batch.status
        self._progress.extend(batch.progress)
        self._ends.extend(batch.ends)
        if batch.progress or batch.ends:
            self._has_outputs.set()
        for answer in batch.answers:
            self._answer(answer)

    def _end(self, end: RequestEnd) -> None:
        self._ends.append(end)
        self._has_outputs.set()

    def _answer(self, answer: CommandAnswer) -> None:
        future = self._answers.get(answer.command_id)
        if future is None or future.done():
            return
        if answer.refusal is not None:
            future.set_exception(RefusedError(answer.refusal))
        else:
            future.set_result(answer.body)

    def _look_for_controller(self) -> None:
        """Every now and then: is it still polling?"""
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
        """What is refused from now on is refused to the end."""
        if self._watch is not None:
            self._watch.cancel()
        if not self._is_over:
            self._is_over = True
            self._fail_all(refusal)

    def _fail_all(self, refusal: Refusal) -> None:
        self._refuses = refusal
        with self._lock:
            # These have no caller any more; a controller that comes back is to end what it has.
            self._requests.clear()
            self._commands.clear()
        self._tell_of_aborts(list(self._pending))
        ended = {end.request_id for end in self._ends}
        for request_id in self._pending - ended:
            self._end(RequestEnd(request_id=request_id, refusal=refusal))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RefusedError(refusal))


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
