"""A replica whose engine loop runs in a thread of this process."""

from __future__ import annotations

import asyncio

from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.generation.progress import Listener
from torchtitan_rl.types import (
    Completion,
    EngineStats,
    GenerationRequest,
    OnProgress,
    Progress,
    PullReport,
)
from torchtitan_rl.weights.handle import WeightHandle
from torchtitan_rl.weights.staging import WeightStaging


class LoopReplica:
    """Awaits on an event loop what `EngineLoop` answers from its own thread; see `Replica`."""

    def __init__(
        self, name: str, loop: EngineLoop, staging: WeightStaging, *, close_timeout_s: float = 30.0
    ) -> None:
        self._name = name
        self._loop = loop
        self._staging = staging
        self._close_timeout_s = close_timeout_s
        self._listeners: dict[str, OnProgress] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None

    @property
    def name(self) -> str:
        return self._name

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        if on_progress is None:
            return await asyncio.wrap_future(self._loop.submit(request))
        self._event_loop = asyncio.get_running_loop()
        future = self._loop.submit(request, Listener(sink=self._hop, streams=streams))
        self._listeners[request.request_id] = on_progress
        try:
            return await asyncio.wrap_future(future)
        finally:
            del self._listeners[request.request_id]

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        self._loop.abort(request_ids)

    async def stage(self, handle: WeightHandle) -> None:
        await asyncio.to_thread(self._staging.stage, handle)

    async def pull(self, version: int) -> PullReport:
        report = await asyncio.wrap_future(self._loop.pull(version))
        self._staging.discard_before(version)
        return report

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.wrap_future(self._loop.pause(mode))

    async def resume(self) -> None:
        self._loop.resume()

    async def partials(self) -> dict[str, Completion]:
        return await asyncio.wrap_future(self._loop.partials())

    async def sleep(self) -> None:
        await asyncio.wrap_future(self._loop.sleep())

    async def wake_up(self) -> None:
        await asyncio.wrap_future(self._loop.wake_up())

    async def stats(self) -> EngineStats:
        return self._loop.stats()

    async def close(self) -> None:
        await asyncio.to_thread(self._loop.close, self._close_timeout_s)

    def _hop(self, batch: tuple[Progress, ...]) -> None:
        """From the engine loop's thread to the event loop, once for all requests."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._tell, batch)

    def _tell(self, batch: tuple[Progress, ...]) -> None:
        for progress in batch:
            # Each by itself: one that raises disturbs nobody else.
            asyncio.get_running_loop().call_soon(self._tell_one, progress)

    def _tell_one(self, progress: Progress) -> None:
        listener = self._listeners.get(progress.request_id)
        if listener is not None:
            listener(progress)
