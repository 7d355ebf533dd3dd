"""The replica's end of its connection to the router: delivers batches of calls to an engine loop in
a thread of its own, whose progress and ends are polled.

Invariants: each call has exactly one end, also where the loop fails, and it follows all progress of
that request; ends leave in the order in which they happened; a stuck loop is reported as lost; an
end leaves at once, with all that comes before it, and progress alone at most once per interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from torchtitan_rl.channel import Abort, Call, CallId, End, Outbox, Submission
from torchtitan_rl.errors import GenerationError, LoopStalledError
from torchtitan_rl.generation.commands import EngineCommand
from torchtitan_rl.generation.engine import StallWatch
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.generation.outstanding import Listener
from torchtitan_rl.types import Progress

IDLE_S = 30.0  # a poll without messages returns after this time


ToReplica = Call[Submission | EngineCommand[Any]] | Abort
FromReplica = Progress | End[Any, BaseException]


class EngineServer:
    """``interval_s``: between two batches of progress. A poll without messages returns after
    ``idle_s``. ``stall_timeout_s``: when a loop without progress counts as stuck (None: never)."""

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
        self._check_s = idle_s if stall_timeout_s is None else stall_timeout_s / 8
        self._idle_s = idle_s
        self._outbox: Outbox[FromReplica] = Outbox(interval_s=interval_s)

    def deliver(self, messages: Iterable[ToReplica]) -> None:
        """Pass calls and aborts to the loop, in order; a refusal is the end of its request."""
        for message in messages:
            match message:
                case Call(payload=Submission() as submission):
                    self._submit(submission)
                case Call(call_id=number, payload=EngineCommand() as command):
                    self._loop.execute(command).add_done_callback(partial(self._on_end, number))
                case Abort(call_id=str(request_id)):
                    self._loop.abort((request_id,))

    async def poll(self) -> tuple[FromReplica, ...]:
        """The messages since the last poll, as soon as there are any and the interval has passed.
        One call at a time.

        Raises:
            LoopStalledError: the loop has made no progress for too long.
        """
        now = asyncio.get_running_loop().time
        deadline_s = now() + self._idle_s
        while True:
            self._require_progress(now())
            left_s = deadline_s - now()
            messages = await self._outbox.take(min(left_s, self._check_s))
            if messages or left_s <= self._check_s:
                return messages

    def _require_progress(self, now_s: float) -> None:
        if self._watch is None or not self._watch.is_stuck(self._loop.pulse(), now_s):
            return
        if not self._outbox.has_messages:  # these are sent first
            raise LoopStalledError(
                f"the engine made no progress for {self._watch.timeout_s:.0f} s with requests "
                "to run"
            )

    def _submit(self, submission: Submission) -> None:
        request = submission.request
        listener = Listener(sink=self._on_progress, streams=submission.streams)
        try:
            future = self._loop.submit(request, listener)
        except GenerationError as error:
            self._outbox.put(End(call_id=request.request_id, error=error), is_urgent=True)
        else:
            future.add_done_callback(partial(self._on_end, request.request_id))

    # The rest runs in the loop's thread.

    def _on_end(self, call_id: CallId, future: Future[Any]) -> None:
        self._outbox.put(_end_of(call_id, future), is_urgent=True)

    def _on_progress(self, progress: tuple[Progress, ...]) -> None:
        self._outbox.put(*progress)


def _end_of(call_id: CallId, future: Future[Any]) -> End[Any, BaseException]:
    error = future.exception()
    if error is not None:
        return End(call_id=call_id, error=error)
    return End(call_id=call_id, result=future.result())
