"""The replica's end of an exchange: submissions come in batches, what becomes of them is collected.

Invariants: each submitted request has exactly one end, whatever happens to the loop, and it comes
after all progress of that request; a reading leaves behind the ends that came before it, and before
all others; a loop that is stuck is no replica any more; what was put here leaves once, and while
requests run at most once per interval; the event loop is woken twice at most for each reply,
however much it holds.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from torchtitan_rl.errors import GenerationError, LoopStalledError
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.generation.progress import Listener
from torchtitan_rl.generation.stall import StallWatch
from torchtitan_rl.types import Completion, EngineReading, GenerationRequest, Progress

IDLE_S = 30.0  # without any news a reply is given after so long


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """``hears``: its progress is wanted; ``streams``: within milliseconds."""

    request: GenerationRequest
    hears: bool = False
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a replica is to do: take the requests in order, then end the aborted ones; ``reads``:
    then be read."""

    requests: tuple[Submission, ...] = ()
    aborts: tuple[str, ...] = ()
    reads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of one request: exactly one of the two."""

    request_id: str
    completion: Completion | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The answer to one batch that reads: exactly one of the two."""

    reading: EngineReading | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What happened since the last reply: progress, then the ends, then a reading. May be empty."""

    progress: tuple[Progress, ...] = ()
    ends: tuple[End, ...] = ()
    read: Read | None = None


class Mailbox:
    """``interval_s``: between two replies, as long as requests run, whose news can be gathered; one
    without any news is given after ``idle_s``. ``stall_timeout_s``: when a loop without progress
    counts as stuck (None: never)."""

    def __init__(
        self,
        loop: EngineLoop,
        *,
        interval_s: float = 0.02,
        idle_s: float = IDLE_S,
        stall_timeout_s: float | None = None,
    ) -> None:
        self._loop = loop
        self._watch = None if stall_timeout_s is None else StallWatch(stall_timeout_s)
        self._interval_s = interval_s
        self._idle_s = idle_s
        self._next_reply_s = 0.0  # in the event loop's time
        self._lock = threading.Lock()  # guards all below
        self._num_running = 0
        self._progress: list[Progress] = []
        self._ends: deque[End | Read] = deque()
        self._is_awaited: Callable[[], bool] = bool  # what who collects waits for, and its bell
        self._wake: Callable[[], object] | None = None

    def submit(self, batch: Batch) -> None:
        """Hand it to the loop; a request that is refused ends by that."""
        with self._lock:
            self._num_running += len(batch.requests)
        for submission in batch.requests:
            request = submission.request
            listener = None
            if submission.hears:
                listener = Listener(sink=self._hear, streams=submission.streams)
            try:
                future = self._loop.submit(request, listener)
            except GenerationError as error:
                self._end(End(request_id=request.request_id, error=error))
            else:
                future.add_done_callback(partial(self._on_done, request.request_id))
        self._loop.abort(batch.aborts)
        if batch.reads:
            self._loop.read().add_done_callback(self._on_read)

    async def collect(self) -> News:
        """What happened since the last reply, as soon as there is something and the interval has
        passed or no request runs. One call at a time.

        Raises:
            LoopStalledError: the loop has made no progress for too long.
        """
        now = asyncio.get_running_loop().time
        await self._wait_until(lambda: bool(self._progress or self._ends), self._idle_s)
        await self._wait_until(lambda: self._num_running == 0, self._next_reply_s - now())
        self._next_reply_s = now() + self._interval_s
        with self._lock:
            progress, self._progress = tuple(self._progress), []
            ends: list[End] = []
            while self._ends:
                match self._ends.popleft():
                    case End() as end:
                        ends.append(end)
                    case Read() as read:
                        return News(progress=progress, ends=tuple(ends), read=read)
        return News(progress=progress, ends=tuple(ends))

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Or until the time is over. Meanwhile the loop has to get on with its work."""
        now = asyncio.get_running_loop().time
        deadline_s = now() + timeout_s
        while True:
            self._require_progress(now())
            left_s = deadline_s - now()
            look_s = left_s if self._watch is None else min(left_s, self._watch.timeout_s / 8)
            if await self._is_reached(condition, look_s) or look_s >= left_s:
                return

    def _require_progress(self, now_s: float) -> None:
        if self._watch is None or self._ends or not self._watch.is_stuck(self._loop.pulse(), now_s):
            return
        raise LoopStalledError(
            f"the engine made no progress for {self._watch.timeout_s:.0f} s with requests to run"
        )

    async def _is_reached(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        reached = asyncio.Event()
        with self._lock:
            if timeout_s <= 0 or condition():
                return True
            self._is_awaited = condition
            self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, reached.set)
        try:
            async with asyncio.timeout(timeout_s):
                await reached.wait()
                return True
        except TimeoutError:
            return False
        finally:
            with self._lock:
                self._wake = None

    # The rest runs in the loop's thread, as a rule.

    def _on_done(self, request_id: str, future: Future[Completion]) -> None:
        error = future.exception()
        if error is not None:
            self._end(End(request_id=request_id, error=error))
        else:
            self._end(End(request_id=request_id, completion=future.result()))

    def _on_read(self, future: Future[EngineReading]) -> None:
        error = future.exception()
        with self._lock:
            self._ends.append(Read(error=error) if error else Read(reading=future.result()))
            self._ring()

    def _hear(self, progress: tuple[Progress, ...]) -> None:
        with self._lock:
            self._progress += progress
            self._ring()

    def _end(self, end: End) -> None:
        with self._lock:
            self._ends.append(end)
            self._num_running -= 1
            self._ring()

    def _ring(self) -> None:
        if self._wake is not None and self._is_awaited():
            wake, self._wake = self._wake, None
            wake()
