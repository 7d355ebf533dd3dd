"""A generator replica in processes of its own: one actor a rank, each with its engine loop.

Rank 0 serves the router's connection, a `Stream` of requests, commands and their ends; the other
ranks follow the broadcast decisions and only stage weights. All endpoints are concurrent, for a
plain one would hold up every other call of its actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

from monarch.actor import Actor, Port, concurrent_endpoint, current_rank

from torchtitan_rl.backends.monarch.generator_rank import ActorEnd, Stream
from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.backends.monarch.runtime import (
    ProcessLostError,
    ProcessMesh,
    call,
    spawn_processes,
    stop_processes,
)
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.channel import Abort
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import DeadlineError, WeightSyncError
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.routing.connected_replica import ConnectedReplica
from torchtitan_rl.weights.distribution import WeightDistribution
from torchtitan_rl.weights.handle import SharedMemoryHandle, WeightHandle

_CLOSE_S = 60.0
_LOST_CLOSE_S = 2.0  # of a lost replica: ranks that still work can close their loops


class GeneratorActor(Actor):
    """One rank of a replica."""

    def __init__(self, spec: GeneratorSpec) -> None:
        self._spec = spec
        self._rank = current_rank().rank

    @concurrent_endpoint
    async def start(self) -> None:
        """Build the engine (all ranks together) and start stepping."""
        from torchtitan_rl.backends.monarch.generator_rank import GeneratorRank

        self._generator = await asyncio.to_thread(GeneratorRank, self._spec, self._rank)
        server = self._generator.server
        self._connection = ActorEnd(server.deliver, server.poll)

    @concurrent_endpoint
    async def connect(self, port: Port[Any]) -> None:
        """Serve the connection, on rank 0 alone, until it fails."""
        await self._connection.run(port)

    @concurrent_endpoint
    async def until_received(self, count: int) -> None:
        await self._connection.until_received(count)

    @concurrent_endpoint
    async def stage(self, handle: SharedMemoryHandle) -> None:
        await self._generator.stage(handle)

    @concurrent_endpoint
    async def close(self) -> None:
        await self._generator.close()


class GeneratorProcesses:
    """The processes of one replica; see `ReplicaPeer`. Errors arrive as this package's own."""

    def __init__(
        self, mesh: ProcessMesh, spec: GeneratorSpec, *, weights: WeightDistribution, host: int
    ) -> None:
        self._mesh = mesh
        self._spec = spec
        self._weights = weights
        self._host = host
        self._ranks = mesh.mesh.spawn("generator", GeneratorActor, spec)
        self._leader = self._ranks.slice(ranks=0)
        self._stream: Stream[tuple[ToReplica, ...], tuple[FromReplica, ...]] = Stream(
            self.name,
            run=self._leader.connect.call_one,
            until_received=self._leader.until_received.call_one,
        )

    @property
    def name(self) -> str:
        return self._mesh.name

    async def start(self) -> None:
        await call(
            self._ranks.start.call(),
            what=f"start of {self.name}",
            timeout_s=self._spec.generator.start_timeout_s,
        )
        await self._stream.open(timeout_s=self._silence_s)

    async def deliver(self, messages: tuple[ToReplica, ...]) -> None:
        self._stream.send(messages)
        if any(isinstance(one, Abort) for one in messages):
            await self._stream.until_received()  # the router holds the deadline

    async def poll(self) -> tuple[FromReplica, ...]:
        return await self._stream.receive(timeout_s=self._silence_s)

    @property
    def _silence_s(self) -> float:
        """A process that sends nothing, not even an empty batch, for so long counts as lost."""
        return 2 * self._spec.generator.stall_timeout_s

    async def stage(self, handle: WeightHandle) -> None:
        local = await self._weights.local(handle, self._host)
        what = f"{self.name}: fetch of version {handle.version}"
        await call(self._ranks.stage.call(local), what=what)

    async def close_loop(self, *, is_lost: bool) -> None:
        timeout_s = _LOST_CLOSE_S if is_lost else _CLOSE_S
        # The processes end in any case, whatever state they are in.
        with contextlib.suppress(ProcessLostError, DeadlineError, WeightSyncError):
            await call(self._ranks.close.call(), what=f"close of {self.name}", timeout_s=timeout_s)

    async def close(self) -> None:
        await self._stream.close()
        await stop_processes(self._mesh)


MonarchReplica = ConnectedReplica[GeneratorProcesses]


async def spawn_replica(
    group: ProcessGroup,
    spec: GeneratorSpec,
    hosts: Hosts | None = None,
    *,
    weights: WeightDistribution | None = None,
) -> MonarchReplica:
    """Start the processes; ``replica.peer.start()`` then builds the engine in them.

    Args:
        spec: its ``model`` is where the controller has it.
        weights: fetches new weights to the replica's host; None: they are on this host.
    """
    hosts = hosts or Hosts()
    environment = engine_environment(group.threads, spec.device)
    mesh = await spawn_processes(group, log_dir=spec.log_dir, environment=environment, hosts=hosts)
    spec = replace(spec, model=hosts[group.host].policy_dir or spec.model)
    weights = weights or WeightDistribution({}, fan_out=0)
    return ConnectedReplica(GeneratorProcesses(mesh, spec, weights=weights, host=group.host))
