"""A replica whose engine loop runs in a thread of this process."""

from __future__ import annotations

import asyncio

from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.generation.server import EngineServer, FromReplica, ToReplica
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.weights.distribution import WeightHandle
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

    def send(self, messages: tuple[ToReplica, ...]) -> None:
        self._server.deliver(messages)

    async def receive(self) -> tuple[FromReplica, ...]:
        return await self._server.take()

    async def stage(self, handle: WeightHandle) -> None:
        if self._staging is not None:
            await asyncio.to_thread(self._staging.stage, handle)

    async def close_loop(self, *, is_lost: bool) -> None:
        await asyncio.to_thread(self._loop.close, 30.0)

    async def close(self) -> None:
        return


def loop_replica(
    name: str,
    loop: EngineLoop,
    staging: WeightStaging | None = None,
    *,
    stall_timeout_s: float = 120.0,
) -> ConnectedReplica[LoopPeer]:
    server = EngineServer(loop, interval_s=0.0, stall_timeout_s=stall_timeout_s)
    return ConnectedReplica(LoopPeer(name, server, loop, staging))
