"""The replica's end of its channel: passes calls to an engine loop, and sends progress and ends of
calls.

Invariants: each call has exactly one end, even if the loop fails, after all progress of its
request. Ends leave in the order in which they happened, at once, with all earlier messages;
progress alone leaves at most once per interval. A stuck loop is reported as lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from torchtitan_rl.channel import Call, CallId, End, Outbox
from torchtitan_rl.errors import GenerationError, LoopStalledError
from torchtitan_rl.generation.commands import EngineCommand
from torchtitan_rl.generation.engine import StallWatch
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.types import GenerationRequest, Progress

ToReplica = Call[GenerationRequest | EngineCommand[Any]]
FromReplica = Progress | End[Any, BaseException]


class EngineServer:
    """``interval_s``: the shortest time between two batches of progress. ``stall_timeout_s``: a
    busy loop without progress for this time counts as stuck."""

    def __init__(
        self, loop: EngineLoop, *, interval_s: float = 0.02, stall_timeout_s: float = 120.0
    ) -> None:
        self._loop = loop
        self._watch = StallWatch(stall_timeout_s)
        self._outbox: Outbox[FromReplica] = Outbox(interval_s=interval_s)

    def deliver(self, messages: Iterable[ToReplica]) -> None:
        """Pass calls to the loop, in order. A refused request gets an `End` with the error."""
        for message in messages:
            match message.payload:
                case GenerationRequest() as request:
                    streams = message.streams
                    try:
                        answer = self._loop.submit(request, self._on_progress, streams=streams)
                    except GenerationError as error:
                        self._outbox.put(End(call_id=message.call_id, error=error), is_urgent=True)
                        continue
                case command:
                    answer = self._loop.execute(command)
            answer.add_done_callback(partial(self._on_end, message.call_id))

    async def take(self) -> tuple[FromReplica, ...]:
        """Wait for the next batch to send. After a silence the batch is empty, to show that the
        process answers. Raises LoopStalledError: the loop was busy without progress for
        ``stall_timeout_s``."""
        now_s = asyncio.get_running_loop().time()
        timeout_s = self._watch.timeout_s
        if self._watch.is_stuck(self._loop.pulse(), now_s):
            raise LoopStalledError(
                f"the engine made no progress for {timeout_s:.0f} s with requests to run"
            )
        return await self._outbox.take(timeout_s / 8)

    # The rest runs in the loop's thread.

    def _on_end(self, call_id: CallId, future: Future[Any]) -> None:
        error = future.exception()
        result = None if error is not None else future.result()
        self._outbox.put(End(call_id=call_id, result=result, error=error), is_urgent=True)

    def _on_progress(self, progress: tuple[Progress, ...]) -> None:
        self._outbox.put(*progress)
