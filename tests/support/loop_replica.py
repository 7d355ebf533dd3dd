"""A replica whose engine loop runs in a thread of this process."""

from __future__ import annotations

import asyncio

from torchtitan_rl.aio import cancel_all
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.generation.server import EngineServer, FromReplica, ToReplica
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.weights.handle import WeightHandle
from torchtitan_rl.weights.shm import WeightStaging


class LoopPeer:
    """Without a ``staging`` there is nothing to fetch."""

    def __init__(
        self, name: str, server: EngineServer, loop: EngineLoop, staging: WeightStaging | None
    ) -> None:
        self.name = name
        self._server = server
        self._loop = loop
        self._staging = staging
        self._received: asyncio.Queue[tuple[FromReplica, ...]] = asyncio.Queue()
        self._running: asyncio.Task[None] | None = None

    def send(self, messages: tuple[ToReplica, ...]) -> None:
        self._server.deliver(messages)

    async def receive(self) -> tuple[FromReplica, ...]:
        if self._running is None:
            self._running = asyncio.create_task(self._server.run(self._received.put_nowait))
        receiving = asyncio.ensure_future(self._received.get())
        await asyncio.wait({receiving, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            receiving.cancel()
            self._running.result()
        return receiving.result()

    async def stage(self, handle: WeightHandle) -> None:
        if self._staging is not None:
            await asyncio.to_thread(self._staging.stage, handle)

    async def close_loop(self, *, is_lost: bool) -> None:
        await asyncio.to_thread(self._loop.close, 30.0)

    async def close(self) -> None:
        if self._running is not None:
            await cancel_all([self._running])


def loop_replica(
    name: str,
    loop: EngineLoop,
    staging: WeightStaging | None = None,
    *,
    stall_timeout_s: float | None = None,
) -> ConnectedReplica[LoopPeer]:
    server = EngineServer(loop, interval_s=0.0, stall_timeout_s=stall_timeout_s)
    return ConnectedReplica(LoopPeer(name, server, loop, staging))
