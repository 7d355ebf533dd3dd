"""Runs the requests and commands of an endpoint's clients in the controller.

A result is sent at once if nothing was sent for an interval, if no other request runs, or if it
answers a command. Other results are sent together, once per interval.

A lost endpoint is started again (`EndpointRestarts`). Requests that may be repeated run on; if no
repetition has arrived ``grace_s`` after the new process began to serve, they are cancelled.

Invariants: each request that arrived and was not aborted gets exactly one end, and each command
gets exactly one answer, even when the bridge is closed; a lost process gets none. A request that
its client aborted is cancelled. A request that is repeated after a loss is not run again, unless it
was cancelled or had failed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan_rl.aio import cancel_all, first_of
from torchtitan_rl.channel import Abort, Call, CallId, End, Outbox
from torchtitan_rl.errors import (
    EndpointLostError,
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
)
from torchtitan_rl.failures import Failure
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import (
    Command,
    CommandName,
    Counted,
    Handler,
    SystemStatus,
    ToController,
    ToEndpoint,
    handler,
)
from torchtitan_rl.serving.restarts import Endpoint, EndpointRestarts
from torchtitan_rl.serving.runs import ClientCall, Runs
from torchtitan_rl.types import Completion, GenerateFn, GenerationRequest, Progress

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BridgeCounts:
    """Counts of requests since the start. The keys of ``by_refusal`` are codes of refusals; those
    of ``by_event`` are names of events that the endpoint's process counted."""

    received: int = 0
    completed: int = 0
    aborted: int = 0
    by_refusal: Counter[str] = dataclasses.field(default_factory=Counter)
    by_event: Counter[str] = dataclasses.field(default_factory=Counter)

    def gauges(self) -> dict[str, float]:
        """The counts, by their names in Prometheus."""
        counts = {
            "requests_total": self.received,
            "requests_completed_total": self.completed,
            "requests_aborted_total": self.aborted,
        }
        for code, number in self.by_refusal.items():
            counts[f'requests_refused_total{{code="{code}"}}'] = number
        for name, number in self.by_event.items():
            counts[f'request_events_total{{event="{name}"}}'] = number
        return {name: float(number) for name, number in counts.items()}


@dataclass(eq=False)
class EndpointBridge:
    """Runs the requests and commands of an endpoint's clients until `run` is cancelled.

    While several requests run, a batch is sent every ``interval_s``. Without ``restarts``, and
    after `end`, a lost endpoint is not started again.
    """

    endpoint: Endpoint
    _: dataclasses.KW_ONLY
    complete: GenerateFn
    handlers: Mapping[CommandName, Handler]
    status: Callable[[], SystemStatus]
    interval_s: float
    status_interval_s: float = 1.0
    restarts: EndpointRestarts | None = None
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        self._runs = Runs()
        self.handlers = {**self.handlers, "repeat": handler(self._runs.take)}
        self._outbox: Outbox[ToEndpoint] = Outbox(interval_s=self.interval_s)
        self._calls: dict[CallId, ClientCall] = {}  # those whose end is to be sent
        self._num_adopted = 0  # requests, since the last restart
        self._settling: tuple[Failure, asyncio.TimerHandle] | None = None
        self._tasks: set[asyncio.Future[Any]] = set()  # requests, aborted or not, and commands
        self._is_ready = asyncio.Event()
        self.ready = self._is_ready.wait  # returns once the endpoint has the system's status
        self._is_closing = False
        self._is_ending = False
        self.is_lost = False  # the endpoint is being started again
        self.counts = BridgeCounts()

    @property
    def num_running(self) -> int:
        return sum(isinstance(call_id, str) for call_id in self._calls)

    def end(self) -> None:
        """Start the endpoint no more, because it is going to be closed."""
        self._is_ending = True

    async def run(self, *others: Coroutine[Any, Any, None]) -> None:
        """Run, together with ``others``, until this call is cancelled or one of its tasks fails.
        Requests and commands that are still running then are refused.

        Raises:
            EndpointLostError: the endpoint's process is gone.
            Exception: another task failed, for example reading the status.
        """
        is_lost = False
        try:
            await first_of(self._send_all(), self._receive_all(), self._report_status(), *others)
        except EndpointLostError:
            is_lost = True
            raise
        finally:
            self._is_closing = True
            self._report()
            await cancel_all(self._tasks)
            if not is_lost:
                self._send(self._outbox.take_now())

    async def _send_all(self) -> None:
        while True:
            self._send(await self._outbox.take())

    def _send(self, messages: tuple[ToEndpoint, ...]) -> None:
        if not self.is_lost:
            self.endpoint.send(_compacted(messages))

    async def _report_status(self) -> None:
        while True:
            self._outbox.put(self.status())
            await asyncio.sleep(self.status_interval_s)

    async def _receive_all(self) -> None:
        while True:
            try:
                messages = await self.endpoint.receive()
            except EndpointLostError as error:
                if self.restarts is None or self._is_ending:
                    raise
                await self._replace(self.restarts, error)
                continue
            self._handle(messages)
            self._is_ready.set()

    async def _replace(self, restarts: EndpointRestarts, error: EndpointLostError) -> None:
        self._report()
        self.is_lost = True
        self._lose()
        failure = await restarts.restart(self.endpoint, error)
        self.is_lost = False
        self._outbox.put(self.status(), is_urgent=True)
        loop = asyncio.get_running_loop()
        self._settling = failure, loop.call_later(self.grace_s, self._settle)

    def _settle(self) -> None:
        """Cancel the requests of the lost process that no one has repeated."""
        for call in self._runs.running_orphans():
            self._cancel(call)
        self._report()

    def _report(self) -> None:
        """Report the last restart, with what was repeated since."""
        if self._settling is None or self.restarts is None:
            return
        (failure, timer), self._settling = self._settling, None
        timer.cancel()
        self.restarts.on_failure(dataclasses.replace(failure, requests_again=self._num_adopted))
        self._num_adopted = 0

    def _lose(self) -> None:
        """Forget the lost process. Cancel the requests that no one can repeat, and the leases,
        whose problems other workers should get."""
        self._outbox.discard(lambda message: True)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.call_id = None
            if (not call.command and not call.run) or call.command == "problem.lease":
                self._cancel(call)
        self._runs.lose_process()

    def _handle(self, messages: tuple[ToController, ...]) -> None:
        for message in messages:
            match message:
                case Call() as call:
                    self._start(call)
                case Abort(call_id=call_id):
                    self._abort(call_id)
                case Counted(name=name):
                    self.counts.by_event[name] += 1

    def _start(self, call: Call[Any]) -> None:
        adopted = self._runs.adopt(call)
        if adopted is None:
            self._calls[call.call_id] = self._run_call(call)
            return
        self._calls[call.call_id] = adopted
        self._num_adopted += not adopted.command
        if adopted.task.done():
            self._send_end(adopted)
        else:
            self._outbox.put(*(_renamed(piece, call.call_id) for piece in adopted.pieces))

    def _run_call(self, call: Call[Any]) -> ClientCall:
        one, payload = ClientCall.of(call), call.payload
        self.counts.received += not one.command
        work: Coroutine[Any, Any, Any]
        work = self._answer(payload) if one.command else self._generate(one, payload)
        one.task = asyncio.create_task(work, name=f"endpoint {call.call_id}")
        self._runs.add(one)
        self._tasks.add(one.task)
        one.task.add_done_callback(partial(self._on_done, one))
        return one

    def _abort(self, call_id: CallId) -> None:
        call = self._calls.get(call_id)
        if call is None:
            return
        if not call.command:  # the link does not wait for the end of a request that it aborted
            del self._calls[call_id]
            call.call_id = None
        self._cancel(call)

    def _cancel(self, call: ClientCall) -> None:
        call.is_aborted = True
        self.counts.aborted += not call.command
        call.task.cancel()

    async def _generate(self, call: ClientCall, request: GenerationRequest) -> Completion:
        on_progress = partial(self._progress, call) if call.streams else None
        completion = await self.complete(request, on_progress)
        # Clients do not get what only the loss needs.
        return dataclasses.replace(completion, kept_tokens=(), routed_experts=None)

    def _progress(self, call: ClientCall, progress: Progress) -> None:
        progress = dataclasses.replace(progress, kept_tokens=())
        if call.run:
            call.pieces.append(progress)
        if call.call_id is not None:
            self._outbox.put(_renamed(progress, call.call_id))

    async def _answer(self, command: Command) -> Mapping[str, Any]:
        if command.name not in self.handlers:
            raise RefusedError(404, "not_available", f"{command.name} is not available here")
        return await self.handlers[command.name](command.arguments)

    def _on_done(self, call: ClientCall, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        refusal = self._refusal(task)
        if not call.command and not call.is_aborted:
            if refusal is None:
                self.counts.completed += 1
            else:
                self.counts.by_refusal[refusal.code] += 1
        is_kept = refusal is None and not call.is_aborted
        self._runs.end(call, task.result() if is_kept else None)
        if call.call_id is not None:
            self._send_end(call)

    def _send_end(self, call: ClientCall) -> None:
        call_id, call.call_id = call.call_id, None
        assert call_id is not None
        del self._calls[call_id]
        refusal = self._refusal(call.task)
        result = call.task.result() if refusal is None else None
        if isinstance(result, Completion):
            result = dataclasses.replace(result, request_id=str(call_id))
        # Urgent if no other request runs: then no further result can be sent with this one.
        is_urgent = bool(call.command) or not self.num_running
        self._outbox.put(End(call_id=call_id, result=result, error=refusal), is_urgent=is_urgent)

    def _refusal(self, task: asyncio.Future[Any]) -> RefusedError | None:
        """The refusal for a failed or cancelled task; None if the task has a result."""
        if task.cancelled():
            if self._is_closing:
                return RefusedError(503, "shutting_down", "the system is shutting down")
            return RefusedError(503, "cancelled", "the request was cancelled")
        if (error := task.exception()) is None:
            return None
        if isinstance(error, Exception):
            return _refusal_of(error)
        raise error


def _renamed(progress: Progress, call_id: CallId) -> Progress:
    """In a rollout's session the request has another id."""
    return dataclasses.replace(progress, request_id=str(call_id))


def _refusal_of(error: Exception) -> RefusedError:
    """The refusal that a client gets for an error. Its message has no internals; an unexpected
    error is logged."""
    match error:
        case RefusedError():
            return error
        case InvalidRequestError():
            return RefusedError(400, "invalid_request", str(error))
        case GenerationTimeoutError():
            return RefusedError(504, "timeout", "the request was not completed in time")
        case GenerationError():
            logger.warning("a client's request failed: %s", error)
            return RefusedError(503, "no_replica", "no replica could complete the request")
        case _:
            logger.error("a client's request failed unexpectedly", exc_info=error)
            return RefusedError(500, "internal_error", "internal error")


def _compacted(messages: tuple[ToEndpoint, ...]) -> tuple[ToEndpoint, ...]:
    """Merge messages: one `Progress` for each request, and none for a request that ends in the
    same batch, because its end has the whole completion."""
    pieces: dict[CallId, list[Progress]] = {}
    others: list[ToEndpoint] = []
    for message in messages:
        if isinstance(message, Progress):
            pieces.setdefault(message.request_id, []).append(message)
            continue
        others.append(message)
        if isinstance(message, End):
            pieces.pop(message.call_id, None)
    return (*map(_joined, pieces.values()), *others)


def _joined(pieces: list[Progress]) -> Progress:
    """Join consecutive pieces of one request."""
    if len(pieces) == 1:
        return pieces[0]
    return dataclasses.replace(
        pieces[-1],
        start=pieces[0].start,
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        top_logprobs=tuple(top for piece in pieces for top in piece.top_logprobs),
    )
