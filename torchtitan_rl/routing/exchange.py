"""The router's end of an exchange with one replica, wherever that is: many calls in few messages.

Invariants: one batch is under way at a time, in which everything leaves that was asked for while
the one before it was, and the first leaves at once; one request for news is outstanding from the
first call on. Every call ends once: with its completion, its own error or, all of them and all
later ones, with the loss of the replica. Of a call that was given up nothing more is heard, and its
id is taken again only when the replica has ended it. Ends and readings are passed on in the order
in which they happened: nothing is passed on before what came before has reached its caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from torchtitan_rl.errors import InvalidRequestError, LoopClosedError, ReplicaError
from torchtitan_rl.generation.futures import copy_of
from torchtitan_rl.generation.mailbox import Batch, End, News, Read, Submission
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    GenerationRequest,
    OnProgress,
    OnReading,
    Progress,
)


class _Call:
    def __init__(self, on_progress: OnProgress | None) -> None:
        self.future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.on_progress = on_progress
        self.is_given_up = self.is_returned = False

    def hear(self, progress: Progress) -> None:
        if self.on_progress is not None and not self.is_given_up:
            self.on_progress(progress)

    def end(self, completion: Completion | None, error: BaseException | None) -> None:
        if error is not None:
            self.future.set_exception(error)
            self.future.exception()  # retrieved: where the caller is gone nobody else does it
        elif completion is not None:
            self.future.set_result(completion)
        else:
            self.future.cancel()


class _Reader:
    def __init__(self, on_reading: OnReading | None) -> None:
        self.future: asyncio.Future[EngineReading] = asyncio.get_running_loop().create_future()
        self._on_reading = on_reading

    def end(self, read: Read) -> None:
        if self.future.done():
            return  # given up
        if read.reading is None:
            self.future.set_exception(read.error or ReplicaError("it could not be read"))
            return
        if self._on_reading is not None:
            self._on_reading(read.reading)
        self.future.set_result(read.reading)


class Exchange:
    """``submit`` and ``collect`` are those of the replica's `Mailbox`, over whatever carries them;
    what they raise is the loss of the replica."""

    def __init__(
        self,
        name: str,
        *,
        submit: Callable[[Batch], Awaitable[None]],
        collect: Callable[[], Awaitable[News]],
    ) -> None:
        self._name = name
        self._submit = submit
        self._collect = collect
        self._calls: dict[str, _Call] = {}
        self._returning: set[_Call] = set()  # that have ended, and whose callers run on soon
        self._all_returned = asyncio.Event()
        self._readers: list[_Reader] = []  # of the next batch that reads
        self._asked: deque[list[_Reader]] = deque()  # of each one that was sent
        self._requests: dict[str, Submission] = {}  # of the next batch, as are the two below
        self._aborts: dict[str, None] = {}
        self._sent: asyncio.Future[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._lost: ReplicaError | None = None

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        """See `Replica.generate`."""
        request_id = request.request_id
        self.require_replica()
        while (earlier := self._calls.get(request_id)) is not None:
            if not earlier.is_given_up:
                raise InvalidRequestError(
                    f"request {request_id!r} refused: request_id is still outstanding on "
                    f"{self._name}: wait for that request, or use another id"
                )
            await asyncio.wait({earlier.future})
            self.require_replica()
        call = self._calls[request_id] = _Call(on_progress)
        self._requests[request_id] = Submission(
            request=request, hears=on_progress is not None, streams=streams
        )
        self._start()
        try:
            return await asyncio.shield(call.future)
        except asyncio.CancelledError:
            call.is_given_up = True
            if self._requests.pop(request_id, None) is not None:
                self._end(End(request_id=request_id))  # it never left
            raise
        finally:
            call.is_returned = True
            self._returning.discard(call)
            if not self._returning:
                self._all_returned.set()

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """End these requests with the tokens they have; returns when the replica knows. Unknown
        and ended ids are ignored."""
        self.require_replica()
        outstanding = [name for name in request_ids if name in self._calls]
        if not outstanding:
            return
        self._aborts |= dict.fromkeys(outstanding)
        await asyncio.shield(self._start())
        self.require_replica()

    async def read(self, on_reading: OnReading | None = None) -> EngineReading:
        """See `Replica.read`."""
        self.require_replica()
        reader = _Reader(on_reading)
        self._readers.append(reader)
        self._start()
        return await reader.future

    async def close(self) -> None:
        """Calls that are still outstanding fail."""
        self._lose(LoopClosedError(f"{self._name} was closed"))
        tasks = [task for task in (self._sending, self._collecting) if task is not None]
        if tasks:
            await asyncio.wait(tasks)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def require_replica(self) -> None:
        """Raises `ReplicaError` where it is lost."""
        if self._lost is not None:
            raise copy_of(self._lost)

    def _start(self) -> asyncio.Future[None]:
        """See to it that what was gathered leaves; the result is done when it has arrived."""
        if self._sent is None:
            self._sent = asyncio.get_running_loop().create_future()
        if self._sending is None:
            self._sending = self._run(self._send_all(), "submissions to")
        if self._collecting is None:
            self._collecting = self._run(self._collect_all(), "news of")
        return self._sent

    def _run(self, work: Awaitable[None], what: str) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._lose(error)

        return asyncio.create_task(run(), name=f"{what} {self._name}")

    async def _send_all(self) -> None:
        try:
            while self._sent is not None:
                batch = Batch(
                    requests=tuple(self._requests.values()),
                    aborts=tuple(self._aborts),
                    reads=bool(self._readers),
                )
                sent, self._sent = self._sent, None
                self._requests, self._aborts = {}, {}
                if batch.reads:
                    self._asked.append(self._readers)
                    self._readers = []
                try:
                    await self._submit(batch)
                finally:
                    if not sent.done():
                        sent.set_result(None)
        finally:
            self._sending = None

    async def _collect_all(self) -> None:
        while True:
            news = await self._collect()
            for progress in news.progress:
                call = self._calls.get(progress.request_id)
                if call is not None:
                    # Each by itself: one that raises disturbs nobody else.
                    asyncio.get_running_loop().call_soon(call.hear, progress)
            for end in news.ends:
                self._end(end)
            if news.read is not None:
                while self._returning:
                    self._all_returned.clear()
                    await self._all_returned.wait()
                for reader in self._asked.popleft():
                    reader.end(news.read)

    def _end(self, end: End) -> None:
        call = self._calls.pop(end.request_id, None)
        # An abort that has not left must not meet a later request of this id.
        self._aborts.pop(end.request_id, None)
        if call is not None:
            if not call.is_returned:
                self._returning.add(call)
            call.end(end.completion, end.error)

    def _lose(self, error: BaseException) -> None:
        """The first loss stays; who waits, and whoever comes later, gets a copy."""
        if self._lost is not None:
            return
        lost = error
        if not isinstance(lost, ReplicaError):
            lost = ReplicaError(f"{self._name}: the exchange with it failed: {error!r}")
            lost.__cause__ = error
        self._lost = lost
        calls, self._calls, self._requests = self._calls, {}, {}
        for call in calls.values():
            call.end(None, copy_of(lost))
        for reader in [*self._readers, *(one for asked in self._asked for one in asked)]:
            reader.end(Read(error=copy_of(lost)))
        self._readers.clear()
        self._asked.clear()
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)
        for task in (self._sending, self._collecting):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
