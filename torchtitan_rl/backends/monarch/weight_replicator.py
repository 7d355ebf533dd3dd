"""One process on each host that fetches weights for all replicas there; see `weights/remote.py`.

A process that died, or whose fetch from another host was cancelled, is replaced at the next fetch.
Its versions are lost then; maps of replicas stay valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.backends.monarch.runtime import (
    ActorThread,
    ProcessLostError,
    ProcessMesh,
    call,
    spawn_processes,
    stop_processes,
)
from torchtitan_rl.backends.specs import WeightHostSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import DeadlineError
from torchtitan_rl.weights.handle import Fetched, RemoteMemoryHandle, RemoteSource
from torchtitan_rl.weights.remote import WeightReceiver

_CLOSE_S = 10.0
_START_S = 60.0


class WeightReplicatorActor(Actor):
    """Fetches versions one after another, in one thread."""

    def __init__(self, spec: WeightHostSpec) -> None:
        self._spec = spec
        self._work = ActorThread("weights").run

    @concurrent_endpoint
    async def start(self) -> None:
        await self._work(self._build)

    @concurrent_endpoint
    async def fetch(self, handle: RemoteMemoryHandle, parent: RemoteSource | None) -> Fetched:
        with self._tracer.span("fetch to host", version=handle.version):
            return await self._work(self._receiver.fetch, handle, parent)

    @concurrent_endpoint
    async def offer(self, version: int) -> RemoteSource:
        return await self._work(self._receiver.offer, version)

    @concurrent_endpoint
    async def close(self) -> None:
        await self._work(self._receiver.close)
        self._tracer.close()

    def _build(self) -> None:
        from torchtitan_rl.backends.monarch.rdma import RdmaOffers, RdmaReader
        from torchtitan_rl.observability.trace import Tracer, host_label
        from torchtitan_rl.weights.shm import SharedMemoryPublisher

        spec = self._spec
        self._tracer = Tracer(spec.trace_dir, f"weights of {spec.name} rank 0", host=host_label())
        self._receiver = WeightReceiver(
            SharedMemoryPublisher(spec.run_dir.name, spec.run_dir),
            RdmaReader(timeout_s=spec.weight_sync.timeout_s),
            RdmaOffers(),
            host=spec.name,
        )


class WeightReplicator:
    """A `HostFetcher`, in a process that ``spawn`` starts on the host."""

    def __init__(self, spec: WeightHostSpec, spawn: Callable[[], Awaitable[ProcessMesh]]) -> None:
        self._spec = spec
        self._spawn = spawn
        self._timeout_s = spec.weight_sync.timeout_s
        self._mesh: ProcessMesh | None = None
        self._actor: Any = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the process, unless a usable one runs.

        Raises:
            ReplicaError, DeadlineError: the process did not start.
        """
        async with self._starting:
            if self._actor is None:
                await self._end()  # a process that did not start, or is unusable
                self._mesh = await self._spawn()
                actor: Any = self._mesh.mesh.spawn("weights", WeightReplicatorActor, self._spec)
                await call(
                    actor.start.call_one(), what=f"{self._spec.name}: start", timeout_s=_START_S
                )
                self._actor = actor

    async def fetch(self, handle: RemoteMemoryHandle, parent: RemoteSource | None) -> Fetched:
        try:
            return await self._fetch(handle, parent)
        except ProcessLostError:
            return await self._fetch(handle, parent)

    async def offer(self, version: int) -> RemoteSource:
        await self.start()
        offer = self._actor.offer.call_one(version)
        what = f"{self._spec.name}: offer of {version}"
        return await call(offer, what=what, timeout_s=self._timeout_s)

    async def close(self) -> None:
        if self._actor is not None:
            what = f"{self._spec.name}: close"
            with contextlib.suppress(ProcessLostError, DeadlineError):  # `_end` ends the process
                await call(self._actor.close.call_one(), what=what, timeout_s=_CLOSE_S)
        await self._end()

    async def _fetch(self, handle: RemoteMemoryHandle, parent: RemoteSource | None) -> Fetched:
        what = f"{self._spec.name}: fetch of version {handle.version}"
        await self.start()
        mesh = self._mesh
        try:
            fetch = self._actor.fetch.call_one(handle, parent)
            return await call(fetch, what=what, timeout_s=self._timeout_s)
        except ProcessLostError:
            if self._mesh is mesh:  # else another fetch has replaced it
                await self._end()
            raise
        except asyncio.CancelledError:
            if self._mesh is mesh and parent is not None:
                self._actor = None  # the process's only thread may still read from a lost host
            raise

    async def _end(self) -> None:
        mesh, self._mesh, self._actor = self._mesh, None, None
        if mesh is not None:
            await stop_processes(mesh)


def weight_replicator(
    group: ProcessGroup, spec: WeightHostSpec, hosts: Hosts | None = None
) -> WeightReplicator:
    """Create a `WeightReplicator` for the group's host. `WeightReplicator.start` starts its
    process."""
    spawn = functools.partial(spawn_processes, group, log_dir=spec.log_dir, hosts=hosts)
    return WeightReplicator(spec, spawn)
