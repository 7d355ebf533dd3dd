"""A replica whose engine loop runs in a thread of this process."""

from __future__ import annotations

import asyncio

from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.generation.mailbox import Batch, Mailbox
from torchtitan_rl.routing.exchange import Exchange
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    GenerationRequest,
    OnProgress,
    OnReading,
    PullReport,
)
from torchtitan_rl.weights.handle import WeightHandle
from torchtitan_rl.weights.staging import WeightStaging


class LoopReplica:
    """Awaits on an event loop what `EngineLoop` answers from its own thread; see `Replica`."""

    def __init__(
        self,
        name: str,
        loop: EngineLoop,
        staging: WeightStaging,
        *,
        close_timeout_s: float = 30.0,
        stall_timeout_s: float | None = None,
    ) -> None:
        self._name = name
        self._loop = loop
        self._staging = staging
        self._close_timeout_s = close_timeout_s
        mailbox = Mailbox(loop, interval_s=0.0, stall_timeout_s=stall_timeout_s)

        async def submit(batch: Batch) -> None:
            mailbox.submit(batch)

        self._exchange = Exchange(name, submit=submit, collect=mailbox.collect)

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
        return await self._exchange.generate(request, on_progress, streams=streams)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        await self._exchange.abort(request_ids)

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

    async def read(self, on_reading: OnReading | None = None) -> EngineReading:
        return await self._exchange.read(on_reading)

    async def sleep(self) -> None:
        await asyncio.wrap_future(self._loop.sleep())

    async def wake_up(self) -> None:
        await asyncio.wrap_future(self._loop.wake_up())

    async def stats(self) -> EngineStats:
        return self._loop.stats()

    async def close(self) -> None:
        try:
            await asyncio.to_thread(self._loop.close, self._close_timeout_s)
        finally:
            await self._exchange.close()
