"""A replica at the other end of a connection.

Invariants: every call ends once, with its result, its own error, or the loss of the replica, which
also ends all later calls. A request whose caller was cancelled reports nothing more, and its id is
accepted again only when the replica has ended it. Progress, ends and answers are passed on in the
order in which they happened: an answer follows once all earlier ones have reached their callers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torchtitan_rl.aio import cancel_all
from torchtitan_rl.channel import Abort, Call, CallId, Connection, End, Submission
from torchtitan_rl.errors import InvalidRequestError, LoopClosedError, ReplicaError
from torchtitan_rl.generation.commands import EngineCommand, copy_of
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress, Progress
from torchtitan_rl.weights.handle import WeightHandle

T = TypeVar("T")


class ReplicaPeer(Protocol):
    """Carries the messages of a replica, in general to its processes.

    ``deliver`` and ``poll`` are those of its `EngineServer`; an error of either loses the replica.
    """

    @property
    def name(self) -> str: ...

    async def deliver(self, messages: tuple[ToReplica, ...]) -> None: ...

    async def poll(self) -> tuple[FromReplica, ...]: ...

    async def stage(self, handle: WeightHandle) -> None:
        """See `Replica.stage`."""
        ...

    async def close_loop(self, *, is_lost: bool) -> None:
        """End the engine loop; one that ``is_lost`` gets little time for it."""
        ...

    async def close(self) -> None:
        """End the processes, in any case."""
        ...


PeerT = TypeVar("PeerT", bound=ReplicaPeer)


class _Call:
    """One call. A request is abandoned when its caller was cancelled, and has returned when the
    caller continues."""

    def __init__(self, on_report: Callable[[Any], None] | None) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.on_report = on_report
        self.is_aborted = self.is_abandoned = self.has_returned = False

    def report(self, payload: Any) -> None:
        if self.on_report is not None and not self.is_abandoned:
            self.on_report(payload)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # retrieved: the caller may be gone


class ConnectedReplica(Generic[PeerT]):
    """A `Replica`. Its connection begins with the first call."""

    def __init__(self, peer: PeerT) -> None:
        self.peer = peer
        self._connection: Connection[ToReplica, FromReplica] = Connection(
            peer.name, deliver=peer.deliver, poll=peer.poll, handle=self._handle
        )
        self._calls: dict[CallId, _Call] = {}
        self._returning: set[_Call] = set()  # have ended; their callers continue soon
        self._all_returned = asyncio.Event()
        self._numbers = itertools.count()
        self._connecting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._lost: ReplicaError | None = None

    @property
    def name(self) -> str:
        return self.peer.name

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        """See `Replica.generate`."""
        request_id = request.request_id
        self._require_replica()
        while (earlier := self._calls.get(request_id)) is not None:
            if not earlier.is_abandoned:
                raise InvalidRequestError(
                    f"request {request_id!r} refused: request_id is still outstanding on "
                    f"{self.name}: wait for that request, or use another id"
                )
            await asyncio.wait({earlier.future})
            self._require_replica()
        submission = Submission(request=request, streams=streams)
        call = self._call(request_id, submission, on_progress)
        try:
            completion: Completion = await asyncio.shield(call.future)
            return completion
        except asyncio.CancelledError:
            call.is_abandoned = True
            if self._connection.discard(lambda one: _submits(one, request_id)):
                del self._calls[request_id]
                call.future.cancel()
            raise
        finally:
            call.has_returned = True
            self._returning.discard(call)
            if not self._returning:
                self._all_returned.set()

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """See `Replica.abort`; returns when the replica has received it."""
        self._require_replica()
        calls = {name: self._calls[name] for name in request_ids if name in self._calls}
        if not calls:
            return
        for name, call in calls.items():
            call.is_aborted = True
            self._connection.put(Abort(call_id=name))
        await self._connection.arrived()
        self._require_replica()

    async def execute(
        self, command: EngineCommand[T], on_answer: Callable[[T], None] | None = None
    ) -> T:
        """See `Replica.execute`."""
        self._require_replica()
        answer: T = await self._call(next(self._numbers), command, on_answer).future
        return answer

    async def stage(self, handle: WeightHandle) -> None:
        """See `Replica.stage`."""
        await self.peer.stage(handle)

    async def close(self) -> None:
        """End the peer; calls that are still outstanding fail. A second call waits for the
        first."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close of {self.name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self.peer.close_loop(is_lost=self._lost is not None)
        finally:
            self._lose(LoopClosedError(f"{self.name} was closed"))
            if self._connecting is not None:
                await cancel_all([self._connecting])
            await self.peer.close()

    def _require_replica(self) -> None:
        if self._lost is not None:
            raise copy_of(self._lost)

    def _call(
        self,
        call_id: CallId,
        payload: Submission | EngineCommand[Any],
        on_report: Callable[[Any], None] | None,
    ) -> _Call:
        call = self._calls[call_id] = _Call(on_report)
        self._connection.put(Call(call_id=call_id, payload=payload))
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"to {self.name}")
        return call

    async def _connect(self) -> None:
        try:
            await self._connection.run()
        except Exception as error:
            self._lose(error)

    async def _handle(self, messages: tuple[FromReplica, ...]) -> None:
        for message in messages:
            match message:
                case Progress(request_id=request_id):
                    if (call := self._calls.get(request_id)) is not None:
                        # In a callback of its own: an error in one does not affect the others.
                        asyncio.get_running_loop().call_soon(call.report, message)
                case End(call_id=str()):
                    self._end(message)
                case End():
                    await asyncio.sleep(0)  # earlier progress is passed on first
                    while self._returning:
                        self._all_returned.clear()
                        await self._all_returned.wait()
                    self._answer(message)

    def _end(self, end: End[Completion, BaseException]) -> None:
        call = self._calls.pop(end.call_id, None)
        if call is None:
            return
        if call.is_aborted:
            # Drop an unsent abort, so that it cannot hit a later request with this id.
            self._connection.discard(lambda one: one == Abort(call_id=end.call_id))
        if not call.has_returned:
            self._returning.add(call)
        if end.error is not None:
            call.fail(end.error)
        else:
            call.future.set_result(end.result)

    def _answer(self, end: End[Any, BaseException]) -> None:
        call = self._calls.pop(end.call_id, None)
        if call is None or call.future.done():  # abandoned
            return
        if end.error is not None:
            call.fail(end.error)
        else:
            call.report(end.result)
            call.future.set_result(end.result)

    def _lose(self, error: BaseException) -> None:
        """Keep the first loss; every outstanding and every later call fails with a copy."""
        if self._lost is not None:
            return
        lost = error
        if not isinstance(lost, ReplicaError):
            lost = ReplicaError(f"{self.name}: the connection to it failed: {error!r}")
            lost.__cause__ = error
        self._lost = lost
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(copy_of(lost))


def _submits(message: ToReplica, request_id: str) -> bool:
    return isinstance(message, Call) and message.call_id == request_id
