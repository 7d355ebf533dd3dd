"""A replica at the other end of a channel.

Invariants
- Every call ends once: with its result, its own error, or the loss of the replica. After a loss,
  all later calls fail.
- Messages leave in the order in which they were put. Messages of one iteration of the event loop
  leave together.
- Progress, ends and answers are delivered in the order in which they happened: an answer is
  delivered once all earlier ends have reached their callers. A cancelled caller gets nothing more.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torchtitan_rl.aio import cancel_all, loop_s
from torchtitan_rl.channel import Call, CallId, End
from torchtitan_rl.errors import InvalidRequestError, LoopClosedError, ReplicaError
from torchtitan_rl.generation.commands import EngineCommand, copy_of
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress, Progress
from torchtitan_rl.weights.distribution import WeightHandle

T = TypeVar("T")


class ReplicaPeer(Protocol):
    """Transports messages between a replica's caller and its `EngineServer`, usually in another
    process. After an error of `send` or `receive` the replica is lost."""

    @property
    def name(self) -> str: ...

    def send(self, messages: tuple[ToReplica, ...], /) -> None:
        """Pass a batch to the replica, without waiting for it."""

    async def receive(self) -> tuple[FromReplica, ...]:
        """Return the replica's next batch, which may be empty. Only one call at a time."""

    async def stage(self, handle: WeightHandle) -> None: ...

    async def close_loop(self, *, is_lost: bool) -> None:
        """End the engine loop. A lost replica (``is_lost``) gets little time for this."""

    async def close(self) -> None:
        """End the processes, whatever their state."""


PeerT = TypeVar("PeerT", bound=ReplicaPeer)


class _Call:
    """One call. ``has_returned``: the caller has continued, or was cancelled."""

    def __init__(self, on_report: Callable[[Any], None] | None) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.on_report = on_report
        self.has_returned = False

    def report(self, payload: Any) -> None:
        if self.on_report is not None and not self.has_returned:
            self.on_report(payload)

    def end(self, end: End[Any, BaseException]) -> None:
        if end.error is not None:
            self.fail(end.error)
        elif not self.future.done():
            self.future.set_result(end.result)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # retrieved: the caller may be gone


class ConnectedReplica(Generic[PeerT]):
    """A `Replica` at the other end of a channel. It receives messages from its first call on."""

    def __init__(self, peer: PeerT) -> None:
        self.peer, self.name = peer, peer.name
        self._unsent: list[ToReplica] = []
        self._calls: dict[CallId, _Call] = {}
        self._returning: set[_Call] = set()  # ended calls whose callers have not continued yet
        self._all_returned = asyncio.Event()
        self._numbers = itertools.count()
        self._receiving: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._lost: ReplicaError | None = None
        self._heard_s: float | None = None  # when the last batch came

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        """If the call is cancelled, its request continues to run until an `AbortRequests` or the
        loss of the replica. The id stays outstanding until then."""
        request_id = request.request_id
        if request_id in self._calls:
            why = f"request_id is still outstanding on {self.name}: wait, or use another id"
            raise InvalidRequestError(f"request {request_id!r} refused: {why}")
        call = self._call(request_id, request, on_progress, streams=streams)
        try:
            completion: Completion = await asyncio.shield(call.future)
            return completion
        finally:
            call.has_returned = True
            self._returning.discard(call)
            if not self._returning:
                self._all_returned.set()

    async def execute(
        self, command: EngineCommand[T], on_answer: Callable[[T], None] | None = None
    ) -> T:
        answer: T = await self._call(next(self._numbers), command, on_answer).future
        return answer

    async def stage(self, handle: WeightHandle) -> None:
        await self.peer.stage(handle)

    async def close(self) -> None:
        """End the peer. Outstanding calls fail. A second call of `close` waits for the first."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close of {self.name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self.peer.close_loop(is_lost=self._lost is not None)
        finally:
            self._lose(LoopClosedError(f"{self.name} was closed"))
            if self._receiving is not None:
                await cancel_all([self._receiving])
            await self.peer.close()

    def _call(
        self,
        call_id: CallId,
        payload: GenerationRequest | EngineCommand[Any],
        on_report: Callable[[Any], None] | None,
        *,
        streams: bool = False,
    ) -> _Call:
        if self._lost is not None:
            raise copy_of(self._lost)
        call = self._calls[call_id] = _Call(on_report)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(Call(call_id=call_id, payload=payload, streams=streams))
        if self._receiving is None:
            self._receiving = asyncio.create_task(self._receive(), name=f"from {self.name}")
        return call

    def _send(self) -> None:
        messages, self._unsent = tuple(self._unsent), []
        if self._lost is None:
            try:
                self.peer.send(messages)
            except Exception as error:
                self._lose(error)

    async def _receive(self) -> None:
        try:
            while True:
                messages = await self.peer.receive()
                self._heard_s = loop_s()
                await self._handle(messages)
        except asyncio.CancelledError as error:
            self._lose(error)  # no effect in `close`
            raise
        except Exception as error:
            self._lose(error)

    async def _handle(self, messages: tuple[FromReplica, ...]) -> None:
        for message in messages:
            match message:
                case Progress(request_id=request_id):
                    if (call := self._calls.get(request_id)) is not None:
                        # Each report has its own callback, so an error does not affect other
                        # reports.
                        asyncio.get_running_loop().call_soon(call.report, message)
                case End(call_id=str(request_id)):
                    if (call := self._calls.pop(request_id, None)) is not None:
                        if not call.has_returned:
                            self._returning.add(call)
                        call.end(message)
                case End(call_id=number):
                    await asyncio.sleep(0)  # earlier progress is passed on first
                    while self._returning:
                        self._all_returned.clear()
                        await self._all_returned.wait()
                    call = self._calls.pop(number, None)
                    if call is not None and not call.future.done():  # not cancelled
                        if message.error is None:
                            call.report(message.result)
                        call.end(message)

    def _lose(self, error: BaseException) -> None:
        """Record the loss, if it is the first: all outstanding and later calls fail with a copy of
        the error."""
        if self._lost is not None:
            return
        lost = error
        if not isinstance(lost, ReplicaError):
            lost = ReplicaError(f"{self.name}: the channel to it failed: {error!r}")
            lost.__cause__ = error
        if lost.silent_s is None and self._heard_s is not None:
            lost.silent_s = loop_s() - self._heard_s
        self._lost = lost
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(copy_of(lost))
