"""Runs the requests and commands of an endpoint's clients in the controller.

A result is sent at once if nothing was sent for an interval, if no other request runs, or if it
answers a command. Other results are sent together, once per interval.

Invariants: each request that arrived and was not aborted gets exactly one end, and each command
gets exactly one answer, even when the bridge is closed. A request that its client aborted is
cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan_rl.aio import cancel_all, first_of
from torchtitan_rl.channel import Abort, Call, CallId, End, Outbox
from torchtitan_rl.errors import (
    EndpointLostError,
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
)
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import (
    Command,
    CommandName,
    Counted,
    Handler,
    SystemStatus,
    ToController,
    ToEndpoint,
)
from torchtitan_rl.types import Completion, GenerateFn, GenerationRequest, Progress

logger = logging.getLogger(__name__)


class Endpoint(Protocol):
    """The endpoint's process, as the controller sees it."""

    @property
    def base_url(self) -> str:
        """The base of its URLs, such as ``http://127.0.0.1:8000/v1``."""
        ...

    def send(self, messages: tuple[ToEndpoint, ...]) -> None:
        """Pass a batch to the endpoint, without waiting for it."""
        ...

    async def receive(self) -> tuple[ToController, ...]:
        """Wait for the next batch. After each `SystemStatus` that was sent to the endpoint, a batch
        arrives, even if it is empty. Only one call may wait at a time.

        Raises:
            EndpointLostError: the endpoint's process is gone, has failed, or is closed.
        """
        ...

    async def drain(self, grace_s: float) -> None:
        """Stop accepting connections. Running requests have ``grace_s`` seconds to end, during
        which batches still pass in both directions; requests that have not ended then are refused.
        """
        ...

    async def close(self) -> None: ...


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
        return {
            "requests_total": float(self.received),
            "requests_completed_total": float(self.completed),
            "requests_aborted_total": float(self.aborted),
            **{
                f'requests_refused_total{{code="{code}"}}': float(number)
                for code, number in self.by_refusal.items()
            },
            **{
                f'request_events_total{{event="{name}"}}': float(number)
                for name, number in self.by_event.items()
            },
        }


class EndpointBridge:
    """Runs the requests and commands of an endpoint's clients until `run` is cancelled.

    ``handlers`` answer commands. ``status`` is read every ``status_interval_s``. While several
    requests run, a batch is sent every ``interval_s``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        complete: GenerateFn,
        handlers: Mapping[CommandName, Handler],
        status: Callable[[], SystemStatus],
        interval_s: float,
        status_interval_s: float = 1.0,
    ) -> None:
        self._endpoint = endpoint
        self._complete = complete
        self._handlers = handlers
        self._read_status = status
        self._status_interval_s = status_interval_s
        self._outbox: Outbox[ToEndpoint] = Outbox(interval_s=interval_s)
        self._requests: dict[CallId, asyncio.Task[Completion]] = {}  # those not aborted
        self._commands: dict[CallId, asyncio.Future[Mapping[str, Any]]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()  # requests, aborted or not, and commands
        self._is_ready = asyncio.Event()
        self._is_closing = False
        self.counts = BridgeCounts()

    @property
    def num_running(self) -> int:
        return len(self._requests)

    async def ready(self) -> None:
        """Wait until the endpoint has received the system's status."""
        await self._is_ready.wait()

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
            await cancel_all(self._tasks)
            if not is_lost:
                self._send(self._outbox.take_now())

    async def _send_all(self) -> None:
        while True:
            self._send(await self._outbox.take())

    def _send(self, messages: tuple[ToEndpoint, ...]) -> None:
        self._endpoint.send(_compacted(messages))

    async def _report_status(self) -> None:
        while True:
            self._outbox.put(self._read_status())
            await asyncio.sleep(self._status_interval_s)

    async def _receive_all(self) -> None:
        while True:
            self._handle(await self._endpoint.receive())
            self._is_ready.set()

    def _handle(self, messages: tuple[ToController, ...]) -> None:
        for message in messages:
            match message:
                case Call(payload=GenerationRequest() as request, streams=streams):
                    self._start(request, streams=streams)
                case Call(call_id=number, payload=Command() as command):
                    self._start_command(number, command)
                case Abort(call_id=call_id):
                    self._abort(call_id)
                case Counted(name=name):
                    self.counts.by_event[name] += 1

    def _start(self, request: GenerationRequest, *, streams: bool) -> None:
        self.counts.received += 1
        request_id = request.request_id
        work = self._run_request(request, streams=streams)
        task = asyncio.create_task(work, name=f"endpoint {request_id}")
        self._requests[request_id] = task
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._on_request_done, request_id))

    def _abort(self, call_id: CallId) -> None:
        if (request := self._requests.pop(call_id, None)) is not None:
            self.counts.aborted += 1
            request.cancel()
        elif (command := self._commands.get(call_id)) is not None:
            command.cancel()

    async def _run_request(self, request: GenerationRequest, *, streams: bool) -> Completion:
        request_id = request.request_id

        def on_progress(progress: Progress) -> None:
            # In a rollout's session the request has another id.
            own = dataclasses.replace(progress, request_id=request_id, kept_tokens=())
            self._outbox.put(own)

        completion = await self._complete(request, on_progress if streams else None)
        # Clients do not get what only the loss needs.
        return dataclasses.replace(
            completion, request_id=request_id, kept_tokens=(), routed_experts=None
        )

    def _on_request_done(self, request_id: str, task: asyncio.Task[Completion]) -> None:
        self._tasks.discard(task)
        refusal = self._refusal(task)
        completion = task.result() if refusal is None else None
        if self._requests.get(request_id) is not task:
            return  # aborted: its client no longer waits for the end
        del self._requests[request_id]
        if refusal is None:
            self.counts.completed += 1
        else:
            self.counts.by_refusal[refusal.code] += 1
        end = End(call_id=request_id, result=completion, error=refusal)
        # Urgent if no other request runs: then no further result can be sent with this one.
        self._outbox.put(end, is_urgent=not self._requests)

    def _start_command(self, number: CallId, command: Command) -> None:
        task = asyncio.ensure_future(self._answer(command))
        self._commands[number] = task
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._on_command_done, number))

    async def _answer(self, command: Command) -> Mapping[str, Any]:
        handler = self._handlers.get(command.name)
        if handler is None:
            raise RefusedError(404, "not_available", f"{command.name} is not available here")
        return await handler(command.arguments)

    def _on_command_done(self, number: CallId, task: asyncio.Future[Mapping[str, Any]]) -> None:
        self._tasks.discard(task)
        del self._commands[number]
        refusal = self._refusal(task)
        body = task.result() if refusal is None else None
        self._outbox.put(End(call_id=number, result=body, error=refusal), is_urgent=True)

    def _refusal(self, task: asyncio.Future[Any]) -> RefusedError | None:
        """The refusal for a failed or cancelled task; None if the task has a result."""
        if task.cancelled():
            if self._is_closing:
                return RefusedError(503, "shutting_down", "the system is shutting down")
            return RefusedError(503, "cancelled", "the request was cancelled")
        error = task.exception()
        if error is None or isinstance(error, Exception):
            return None if error is None else _refusal_of(error)
        raise error


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
