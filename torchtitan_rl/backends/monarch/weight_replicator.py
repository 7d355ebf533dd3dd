"""One process on each host that fetches weights for all replicas there; see `weights/remote.py`.

A process that died, or whose fetch from another host was cancelled, is replaced at the next fetch.
The versions that it had fetched are then lost, except where a replica has mapped them already.

`RdmaOffers` and `RdmaReader` transfer memory with Monarch's ``RDMABuffer``. Without RDMA hardware,
Monarch sends the bytes over its own channels, which are encrypted if the run's channels are. Both
classes block: call them from threads with a copy of the endpoint's context (`asyncio.to_thread`
makes one), because Monarch finds the current actor in a context variable.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import monarch
import torch
from monarch.actor import Actor, concurrent_endpoint
from monarch.rdma import RDMABuffer

from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.backends.monarch.runtime import (
    ActorThread,
    ProcessMesh,
    call,
    spawn_processes,
    stop_processes,
)
from torchtitan_rl.backends.specs import WeightHostSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import DeadlineError, ProcessLostError, WeightSyncError
from torchtitan_rl.weights.distribution import Fetched, RemoteMemoryHandle, RemoteSource
from torchtitan_rl.weights.remote import WeightReceiver

_CLOSE_S = 10.0
_START_S = 300.0  # as for the other processes, which start at the same time


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
        """Start the process, unless a usable one runs. Raises ReplicaError, DeadlineError: the
        process did not start."""
        async with self._starting:
            if self._actor is None:
                await self._end()  # a process that did not start, or is unusable
                self._mesh = await self._spawn()
                actor: Any = self._mesh.mesh.spawn("weights", WeightReplicatorActor, self._spec)
                await self._mesh.call(
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
        assert self._mesh is not None
        return await self._mesh.call(offer, what=what, timeout_s=self._timeout_s)

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
        assert mesh is not None
        try:
            fetch = self._actor.fetch.call_one(handle, parent)
            return await mesh.call(fetch, what=what, timeout_s=self._timeout_s)
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
    spawn = functools.partial(spawn_processes, group, log_dir=spec.log_dir, hosts=hosts)
    return WeightReplicator(spec, spawn)


# Without RDMA hardware, Monarch requests the chunks of a buffer one after another, and each chunk
# passes through the processes of both hosts. Reading several slices at the same time keeps all
# these processes busy: 256 MB take 0.33 s instead of 0.50 s on two cores. With chunks of 64 MB,
# Monarch's default, a read takes 1.3 times as long.
_NUM_SLICES = 8
_LEAST_SLICE_BYTES = 4 << 20
_CHUNK_MB = 8


class RdmaOffers:
    def __init__(self) -> None:
        _configure()

    def offer(self, memory: torch.Tensor) -> tuple[RDMABuffer, ...]:
        size = max(_LEAST_SLICE_BYTES, -(-memory.numel() // _NUM_SLICES))
        try:
            return tuple(RDMABuffer(one) for one in torch.split(memory, size))
        except RuntimeError as error:
            raise WeightSyncError(f"no RDMABuffer could be made: {error}") from error

    def withdraw(self, buffers: Sequence[RDMABuffer]) -> None:
        for buffer in buffers:
            buffer.drop().get()


class RdmaReader:
    def __init__(self, *, timeout_s: float) -> None:
        _configure()
        self._timeout_s = max(1, round(timeout_s))

    def __call__(self, buffers: Sequence[RDMABuffer], memory: torch.Tensor) -> None:
        places = torch.split(memory, [buffer.size() for buffer in buffers])
        reads = [
            buffer.read_into(place, timeout=self._timeout_s)
            for buffer, place in zip(buffers, places, strict=True)
        ]
        errors = []
        for read in reads:  # wait for all, because a late read would write into reused memory
            try:
                read.get()
            except Exception as error:  # Monarch raises a plain Exception here
                errors.append(error)
        if errors:
            raise WeightSyncError(f"weights could not be read: {errors[0]}") from errors[0]


def _configure() -> None:
    monarch.configure(rdma_allow_tcp_fallback=True, rdma_max_chunk_size_mb=_CHUNK_MB)
    warnings.filterwarnings("ignore", message="No ibverbs RDMA hardware")
