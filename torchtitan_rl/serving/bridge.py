"""The controller's end of the line to the endpoint's process.

One poll at a time brings what clients want, one delivery at a time takes back what has become of
it: at once when nothing was said for a while or no other request runs, else everything of the last
interval together.

Invariants: each request that was polled and not aborted gets exactly one end, each command exactly
one answer, also when the bridge is closed; a request that nobody waits for any more is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.messages import (
    Command,
    CommandAnswer,
    CommandName,
    Endpoint,
    EndpointRequest,
    Handler,
    Refusal,
    RequestEnd,
    SystemStatus,
    ToEndpoint,
)
from torchtitan_rl.serving.refusals import refusal_of, refused
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress, Progress

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_CLOSING = Refusal(status=503, message="the system is shutting down", code="shutting_down")
_CANCELLED = Refusal(status=503, message="the request was cancelled", code="cancelled")
_LAST_DELIVERY_S = 5.0


class Complete(Protocol):
    """Completes a client's request, such as `GeneratorRouter.generate` does."""

    async def __call__(
        self, request: GenerationRequest, /, on_progress: OnProgress | None = None
    ) -> Completion: ...


@dataclass(slots=True)
class BridgeCounts:
    """Of requests, since the start. ``by_refusal`` is by the refusal's code."""

    polled: int = 0
    completed: int = 0
    aborted: int = 0
    by_refusal: dict[str, int] = dataclasses.field(default_factory=dict)

    def gauges(self) -> dict[str, float]:
        """As Prometheus names them."""
        return {
            "requests_total": float(self.polled),
            "requests_completed_total": float(self.completed),
            "requests_aborted_total": float(self.aborted),
            **{
                f'requests_refused_total{{code="{code}"}}': float(number)
                for code, number in self.by_refusal.items()
            },
        }


class EndpointBridge:
    """Runs what an endpoint's clients want, from `run` on until that is cancelled.

    ``handlers`` answer commands, ``status`` is read every ``status_interval_s``. ``interval_s``
    lies between the starts of two deliveries while requests run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        complete: Complete,
        handlers: Mapping[CommandName, Handler],
        status: Callable[[], SystemStatus],
        interval_s: float,
        status_interval_s: float = 1.0,
    ) -> None:
        self._endpoint = endpoint
        self._complete = complete
        self._handlers = handlers
        self._read_status = status
        self._interval_s = interval_s
        self._status_interval_s = status_interval_s
        self._requests: dict[str, asyncio.Task[Completion]] = {}  # that a client waits for
        self._tasks: set[asyncio.Future[Any]] = set()  # these, aborted ones and commands
        self._progress: dict[str, list[Progress]] = {}
        self._ends: list[RequestEnd] = []
        self._answers: list[CommandAnswer] = []
        self._status: SystemStatus | None = None
        self._has_news = asyncio.Event()
        self._is_quiet = asyncio.Event()  # no request runs
        self._is_quiet.set()
        self._is_ready = asyncio.Event()
        self._is_closing = False
        self.counts = BridgeCounts()

    @property
    def num_running(self) -> int:
        return len(self._requests)

    async def ready(self) -> None:
        """Wait until the endpoint knows the system's status."""
        await self._is_ready.wait()

    async def run(self) -> None:
        """Until it is cancelled or a part of it fails; what runs then is refused.

        Raises:
            EndpointLostError: the endpoint's process is gone, or a loop was ended from within.
            Exception: what a loop raised, such as the reading of the status.
        """
        loops = [
            asyncio.create_task(work, name=f"endpoint {name}")
            for name, work in (
                ("poll", self._poll()),
                ("delivery", self._send()),
                ("status", self._watch()),
            )
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            raise _failure(done)
        finally:
            self._is_closing = True
            is_lost = any(_is_lost(loop) for loop in loops)
            await _cancelled([*loops, *self._tasks])
            if not is_lost:
                await self._say_last_ends()

    async def _say_last_ends(self) -> None:
        try:
            async with asyncio.timeout(_LAST_DELIVERY_S):
                await self._endpoint.deliver(self._take_batch())
        except (EndpointLostError, TimeoutError) as error:
            logger.info("the endpoint did not take the last ends: %s", error)
        except Exception:  # how the bridge ended is what its caller is told
            logger.exception("the last ends could not be delivered")

    # What comes in.

    async def _poll(self) -> None:
        while True:
            batch = await self._endpoint.poll()
            for request in batch.requests:
                self._start(request)
            for request_id in batch.aborts:
                self._abort(request_id)
            for command in batch.commands:
                self._start_command(command)

    def _start(self, request: EndpointRequest) -> None:
        self.counts.polled += 1
        request_id = request.request.request_id
        task = asyncio.create_task(self._run_request(request), name=f"endpoint {request_id}")
        self._requests[request_id] = task
        self._is_quiet.clear()
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._on_request_done, request_id))

    def _abort(self, request_id: str) -> None:
        task = self._requests.pop(request_id, None)
        if task is not None:
            self._note_quiet()
            self.counts.aborted += 1
            task.cancel()

    def _note_quiet(self) -> None:
        if not self._requests:
            self._is_quiet.set()

    async def _run_request(self, request: EndpointRequest) -> Completion:
        request_id = request.request.request_id

        def on_progress(progress: Progress) -> None:
            # Whoever completes it may know the request by another id.
            pieces = self._progress.setdefault(request_id, [])
            pieces.append(dataclasses.replace(progress, request_id=request_id))
            self._has_news.set()

        completion = await self._complete(
            request.request, on_progress=on_progress if request.streams else None
        )
        return dataclasses.replace(completion, request_id=request_id)

    def _on_request_done(self, request_id: str, task: asyncio.Task[Completion]) -> None:
        self._tasks.discard(task)
        refusal = self._refusal(task)
        completion = task.result() if refusal is None else None
        if self._requests.get(request_id) is not task:
            self._progress.pop(request_id, None)
            return  # aborted: nobody waits for its end
        del self._requests[request_id]
        self._note_quiet()
        if refusal is None:
            self.counts.completed += 1
        else:
            of_code = self.counts.by_refusal
            of_code[refusal.code] = of_code.get(refusal.code, 0) + 1
        self._ends.append(RequestEnd(request_id=request_id, completion=completion, refusal=refusal))
        self._has_news.set()

    def _start_command(self, command: Command) -> None:
        task = asyncio.ensure_future(self._answer(command))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._on_command_done, command.command_id))

    async def _answer(self, command: Command) -> Mapping[str, Any]:
        handler = self._handlers.get(command.name)
        if handler is None:
            raise refused(404, "not_available", f"{command.name} is not available here")
        return await handler(command.arguments)

    def _on_command_done(self, command_id: str, task: asyncio.Future[Mapping[str, Any]]) -> None:
        self._tasks.discard(task)
        refusal = self._refusal(task)
        body = task.result() if refusal is None else {}
        answer = CommandAnswer(command_id=command_id, body=body, refusal=refusal)
        self._answers.append(answer)
        self._has_news.set()

    def _refusal(self, task: asyncio.Future[Any]) -> Refusal | None:
        """Why a task that is done has no result; None where it has one."""
        if task.cancelled():
            return _CLOSING if self._is_closing else _CANCELLED
        error = task.exception()
        if error is None or isinstance(error, Exception):
            return None if error is None else refusal_of(error)
        raise error

    # What goes out.

    async def _watch(self) -> None:
        while True:
            self._status = self._read_status()
            self._has_news.set()
            await asyncio.sleep(self._status_interval_s)

    async def _send(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await self._has_news.wait()
            started = now()
            await self._endpoint.deliver(self._take_batch())
            self._is_ready.set()
            # Where no request runs there is nothing to be gathered.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(started + self._interval_s - now()):
                    await self._is_quiet.wait()

    def _take_batch(self) -> ToEndpoint:
        self._has_news.clear()
        # An end has the whole completion: progress that leaves with it says nothing new.
        ended = {end.request_id for end in self._ends}
        batch = ToEndpoint(
            progress=tuple(
                _joined(pieces) for name, pieces in self._progress.items() if name not in ended
            ),
            ends=tuple(self._ends),
            answers=tuple(self._answers),
            status=self._status,
        )
        self._progress = {}
        self._ends, self._answers, self._status = [], [], None
        return batch


def _joined(pieces: list[Progress]) -> Progress:
    """Pieces of one request that follow each other, as one."""
    if len(pieces) == 1:
        return pieces[0]
    return dataclasses.replace(
        pieces[-1],
        start=pieces[0].start,
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        top_logprobs=tuple(top for piece in pieces for top in piece.top_logprobs),
    )


def _is_lost(loop: asyncio.Task[None]) -> bool:
    if not loop.done() or loop.cancelled():
        return False
    return isinstance(loop.exception(), EndpointLostError)


def _failure(ended: Collection[asyncio.Task[None]]) -> BaseException:
    """Why loops have ended that never do."""
    for loop in ended:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            return error
    names = ", ".join(loop.get_name() for loop in ended)
    return EndpointLostError(f"a part of the bridge was cancelled from within: {names}")


async def _cancelled(tasks: Collection[asyncio.Future[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
