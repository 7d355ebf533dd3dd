"""Runs a generator replica in separate processes: one actor per rank, each with its engine loop.

Rank 0 receives requests and commands from the router's channel, and sends back how each of them
ended. Every rank stages weights. All endpoints (Monarch's word for an actor's methods) are
concurrent, because an ordinary endpoint would block all other calls of its actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from dataclasses import replace
from typing import Any

from monarch.actor import Actor, Port, concurrent_endpoint, current_rank

from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.backends.monarch.runtime import (
    ActorChannel,
    ProcessMesh,
    call,
    serve_channel,
    spawn_processes,
    stop_processes,
)
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import DeadlineError, LoopFailedError, ProcessLostError, WeightSyncError
from torchtitan_rl.generation.server import EngineServer, FromReplica, ToReplica
from torchtitan_rl.launch.interfaces import listen_privately
from torchtitan_rl.observability.trace import EngineTrace, Tracer, host_label
from torchtitan_rl.processes import collecting_later
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.weights.distribution import SharedMemoryHandle, WeightDistribution, WeightHandle

_CLOSE_S = 60.0
_LOOP_END_S = 30.0
_LOST_CLOSE_S = 2.0  # time for the working ranks of a lost replica to close their loops


class GeneratorActor(Actor):
    def __init__(self, spec: GeneratorSpec) -> None:
        self._spec = spec
        self._rank = current_rank().rank

    @concurrent_endpoint
    async def start(self) -> None:
        """Build the engine (on all ranks together) and start stepping."""
        with collecting_later():
            self._generator = await asyncio.to_thread(_Rank, self._spec, self._rank)

    @concurrent_endpoint
    async def connect(self, port: Port[Any]) -> None:
        server = self._generator.server
        await serve_channel(port, deliver=server.deliver, take=server.take)

    @concurrent_endpoint
    async def stage(self, handle: SharedMemoryHandle) -> None:
        await self._generator.stage(handle)

    @concurrent_endpoint
    async def close(self) -> None:
        await self._generator.close()


class _Rank:
    """One rank's engine, loop and staged weights, created on all ranks together."""

    def __init__(self, spec: GeneratorSpec, rank: int) -> None:
        from torchtitan_rl.backends.vllm.engine import start_engine_loop  # both import torch
        from torchtitan_rl.weights.pinning import HostPins
        from torchtitan_rl.weights.shm import WeightStaging

        self._rank = rank
        listen_privately()
        self._tracer = Tracer(spec.trace_dir, f"{spec.name} rank {rank}", host=host_label())
        self._engine_trace = EngineTrace(self._tracer)
        # Of a replica's devices, each rank has the one with its own number.
        self._staging = WeightStaging(HostPins(rank if spec.device == "cuda" else None))
        with self._tracer.span("start"):
            self._loop = start_engine_loop(
                spec,
                rank,
                self._staging,
                on_end=self._on_loop_end,
                on_pulled=self._on_pulled,
                on_work=self._engine_trace,
            )
        self.server = EngineServer(self._loop, stall_timeout_s=spec.generator.stall_timeout_s)

    def _on_pulled(self, version: int) -> None:
        # In a separate thread, because freeing memory takes time.
        threading.Thread(target=self._staging.discard_before, args=(version,), daemon=True).start()

    def _on_loop_end(self, failure: LoopFailedError | None) -> None:
        self._engine_trace.flush()
        if failure is None:
            return
        traceback.print_exception(failure)
        if self._rank > 0:
            # The other ranks may wait for this one inside a collective.
            sys.stderr.flush()
            os._exit(1)

    async def stage(self, handle: SharedMemoryHandle) -> None:
        with self._tracer.span("fetch weights", track="fetch", version=handle.version):
            await asyncio.to_thread(self._staging.stage, handle)

    async def close(self) -> None:
        if self._rank == 0:
            await asyncio.to_thread(self._loop.close, _LOOP_END_S)
        self._tracer.close()


class GeneratorProcesses:
    """The processes of one replica; see `ReplicaPeer`."""

    def __init__(
        self, mesh: ProcessMesh, spec: GeneratorSpec, *, weights: WeightDistribution, host: int
    ) -> None:
        self.name = mesh.name
        self._mesh = mesh
        self._spec = spec
        self._weights = weights
        self._host = host
        self._ranks = mesh.mesh.spawn("generator", GeneratorActor, spec)
        self._channel: ActorChannel[tuple[ToReplica, ...], tuple[FromReplica, ...]]
        self._channel = ActorChannel(mesh)
        # A process that sends nothing for this time, not even an empty batch, counts as lost.
        self._silence_s = 2 * spec.generator.stall_timeout_s
        self._has_started = False

    async def start(self) -> None:
        await self._mesh.call(
            self._ranks.start.call(),
            what=f"start of {self.name}",
            timeout_s=self._spec.start_timeout_s,
        )
        leader = self._ranks.slice(ranks=0)
        await self._channel.open(leader.connect.call_one, timeout_s=self._silence_s)
        self._has_started = True

    def send(self, messages: tuple[ToReplica, ...]) -> None:
        self._channel.send(messages)

    async def receive(self) -> tuple[FromReplica, ...]:
        return await self._channel.receive(timeout_s=self._silence_s)

    async def stage(self, handle: WeightHandle) -> None:
        what = f"{self.name}: fetch of version {handle.version}"

        async def read(local: SharedMemoryHandle) -> None:
            await self._mesh.call(self._ranks.stage.call(local), what=what)

        await self._weights.read(handle, self._host, read)

    async def close_loop(self, *, is_lost: bool) -> None:
        if not self._has_started:
            return
        timeout_s = _LOST_CLOSE_S if is_lost else _CLOSE_S
        # `close` ends the processes in any case.
        with contextlib.suppress(ProcessLostError, DeadlineError, WeightSyncError):
            await call(self._ranks.close.call(), what=f"close of {self.name}", timeout_s=timeout_s)

    async def close(self) -> None:
        await self._channel.close()
        await stop_processes(self._mesh)


MonarchReplica = ConnectedReplica[GeneratorProcesses]


async def spawn_replica(
    group: ProcessGroup,
    spec: GeneratorSpec,
    hosts: Hosts | None = None,
    *,
    weights: WeightDistribution | None = None,
) -> MonarchReplica:
    """Start a replica's processes. ``replica.peer.start()`` then builds the engine in them.

    Args:
        spec: ``spec.model`` is the model's path on the controller's host.
        weights: fetches new weights to the replica's host; None: the weights are on this host.
    """
    hosts = hosts or Hosts()
    environment = engine_environment(
        group.threads, spec.device, batch_invariant=spec.generator.batch_invariant
    )
    mesh = await spawn_processes(group, log_dir=spec.log_dir, environment=environment, hosts=hosts)
    spec = replace(spec, model=hosts[group.host].policy_dir or spec.model)
    weights = weights or WeightDistribution({}, fan_out=0)
    return ConnectedReplica(GeneratorProcesses(mesh, spec, weights=weights, host=group.host))
