"""Weights from a trainer to two hosts (loopback addresses) with two readers each; prints JSON.

The trainer's two ranks, the hosts' fetching processes and the readers are real processes; the
readers have no engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torchtitan_rl.backends.monarch  # noqa: F401  (before Monarch)

# isort: split
from monarch.actor import (
    Actor,
    attach_to_workers,
    concurrent_endpoint,
    enable_transport,
    this_host,
)

from tests.real.models import tiny_model
from tests.real.trainer_helpers import CONFIG, MAX_STEPS, random_batch
from tests.support.worker_hosts import worker_hosts
from torchtitan_rl.backends.monarch.hosts import (
    HeldProcesses,
    Host,
    Hosts,
    local_host,
    start_command,
)
from torchtitan_rl.backends.monarch.runtime import ProcessMesh, spawn_processes, supervise
from torchtitan_rl.backends.monarch.trainer import MonarchTrainer
from torchtitan_rl.backends.monarch.weight_replicator import RdmaOffers, WeightReplicator
from torchtitan_rl.backends.specs import TrainerSpec, WeightHostSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.launch.interfaces import free_port
from torchtitan_rl.processes import Processes
from torchtitan_rl.training.config import OptimizerConfig
from torchtitan_rl.weights.config import Transport, WeightSyncConfig
from torchtitan_rl.weights.distribution import (
    RemoteMemoryHandle,
    RemoteSource,
    SharedMemoryHandle,
    WeightDistribution,
)
from torchtitan_rl.weights.image import plan_image, whole_parts
from torchtitan_rl.weights.remote import PartPublisher
from torchtitan_rl.weights.shm import WeightStaging

HOSTS = (1, 2)
READERS = 2  # on each host
_TIMEOUT_S = 600.0  # of fetches; longer than the test


class ReaderActor(Actor):
    def __init__(self) -> None:
        self._staging = WeightStaging()

    @concurrent_endpoint
    async def stage(self, handle: SharedMemoryHandle) -> str:
        await asyncio.to_thread(self._staging.stage, handle)
        return digest(self._staging.tensors(handle.version))


class Stopping:
    """A `HostFetcher` whose process stops, as if its host were cut off, once it is read from."""

    def __init__(self, host: WeightReplicator, mesh: ProcessMesh) -> None:
        self._host = host
        self._mesh = mesh
        self.fetch = host.fetch
        self.pid = 0
        self.has_stopped = asyncio.Event()

    async def offer(self, version: int) -> RemoteSource:
        source = await self._host.offer(version)
        assert isinstance(self._mesh.processes, Processes)
        (self.pid,) = self._mesh.processes._alive()
        self._mesh.watch.cancel()  # of a host that is cut off, nothing is heard
        os.kill(self.pid, signal.SIGSTOP)
        self.has_stopped.set()
        return source


class NotedOffers(RdmaOffers):
    def offer(self, memory: torch.Tensor) -> tuple[Any, ...]:
        self.memory = memory
        return super().offer(memory)


class PublisherActor(Actor):
    def __init__(self, damages: bool) -> None:
        self._damages = damages
        self._offers = NotedOffers()
        self._publisher = PartPublisher(self._offers, owner="trainer rank 0")

    @concurrent_endpoint
    async def publish(self, version: int) -> RemoteMemoryHandle:
        tensors = {"model.norm": torch.full((2000,), float(version))}
        keep: frozenset[int] = frozenset()
        source = await asyncio.to_thread(
            self._publisher.publish, version, whole_parts(tensors), keep=keep
        )
        assert source is not None
        if self._damages:
            self._offers.memory[77] ^= 1
        return RemoteMemoryHandle(layout=plan_image(tensors, version), sources=(source,))


def digest(tensors: Any) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


async def main(root: Path) -> None:
    supervise()
    enable_transport(f"tcp://127.0.0.1:{free_port()}")
    with worker_hosts(2) as addresses:
        hosts = Hosts([local_host(0), *await attached(addresses)])
        meshes: dict[int, ProcessMesh] = {}
        fetchers = {index: weight_replicator(hosts, index, root, meshes) for index in HOSTS}
        again = weight_replicator(hosts, 1, root, meshes)
        readers = {
            index: [spawn_reader(hosts[index].mesh, f"reader{index}{n}") for n in range(READERS)]
            for index in HOSTS
        }
        weights = WeightDistribution(fetchers, fan_out=1)
        try:
            result = await train(root, weights, readers)
            result["damage"] = await damage(weights)
            result["lost"] = await lose_a_fetcher(weights, meshes[1].processes)
            source = Stopping(fetchers[1], meshes[1])
            result["cut off"] = await cut_off_a_source(weights, source, again)
        finally:
            await weights.close()
            await asyncio.gather(*(fetcher.close() for fetcher in (again, *fetchers.values())))
    print(json.dumps(result))


async def train(
    root: Path, weights: WeightDistribution, readers: dict[int, list[Any]]
) -> dict[str, Any]:
    """Three versions of two FSDP ranks."""
    spec = TrainerSpec(
        checkpoint=tiny_model(root / "policy"),
        trainer=dataclasses.replace(
            CONFIG,
            data_parallel_shard=2,
            step_timeout_s=120.0,
            optimizer=OptimizerConfig(learning_rate=1e-6),
        ),
        dtype="float32",
        seed=0,
        num_steps=MAX_STEPS,
        run_dir=root,
        log_dir=root,
        trace_dir=None,
    )
    trainer = await MonarchTrainer.spawn(ProcessGroup(name="trainer", ranks=2, threads=1), spec)
    versions = []
    try:
        await trainer.start(Transport.BOTH)
        for version in range(3):
            if version:
                await trainer.train_step(random_batch(seed=version))
            handle = await trainer.publish()
            assert isinstance(handle, RemoteMemoryHandle)
            assert handle.shared is not None
            own = WeightStaging()
            own.stage(await weights.ensure_on_host(handle, 0))
            arrived = await asyncio.gather(
                *(stage(weights, handle, index, one) for index in HOSTS for one in readers[index])
            )
            fetches = weights.take_fetches()
            versions.append(
                {
                    "own": digest(own.tensors(version)),
                    "arrived": arrived,
                    "bytes": [fetched.num_bytes for fetched in fetches],
                    "whole": handle.num_bytes - len(handle.layout.header),
                    "sources": [source.num_bytes for source in handle.sources],
                }
            )
    finally:
        await trainer.close()
    return {"versions": versions}


async def stage(
    weights: WeightDistribution, handle: RemoteMemoryHandle, host: int, reader: Any
) -> str:
    return await reader.stage.call_one(await weights.ensure_on_host(handle, host))


async def damage(weights: WeightDistribution) -> list[str]:
    """What both hosts say of a version with a wrong byte; the next one arrives."""
    broken = await publish(7, damages=True)
    answers = await asyncio.gather(
        *(weights.ensure_on_host(broken, index) for index in HOSTS), return_exceptions=True
    )
    assert all(isinstance(answer, WeightSyncError) for answer in answers), answers
    whole = await publish(8)
    for index in HOSTS:
        own = WeightStaging()
        own.stage(await weights.ensure_on_host(whole, index))
        assert own.tensors(8)["model.norm"].eq(8.0).all()
    return [str(answer) for answer in answers]


async def lose_a_fetcher(weights: WeightDistribution, process: HeldProcesses) -> int:
    """It is killed; the next version is fetched by a new one. Returns the number of fetches."""
    weights.take_fetches()
    await process.end(0.0)
    newest = await publish(9)
    await asyncio.gather(*(weights.ensure_on_host(newest, index) for index in HOSTS))
    return len(weights.take_fetches())


async def cut_off_a_source(
    weights: WeightDistribution, source: Stopping, again: WeightReplicator
) -> list[int]:
    """Host 1 is stopped while host 2 reads from it, and given up. Returns what both have then."""
    weights.replace(1, source)
    newest = await publish(10)
    await weights.ensure_on_host(newest, 1)
    reading = asyncio.create_task(weights.ensure_on_host(newest, 2))
    await source.has_stopped.wait()
    await asyncio.sleep(3.0)
    assert not reading.done()
    weights.replace(1, again)
    arrived = [(await reading).version, (await weights.ensure_on_host(newest, 1)).version]
    os.kill(source.pid, signal.SIGKILL)
    return arrived


async def publish(version: int, *, damages: bool = False) -> RemoteMemoryHandle:
    mesh = spawn_process(this_host(), f"publisher{version}")
    publisher: Any = mesh.spawn(f"publisher{version}", PublisherActor, damages)
    return await publisher.publish.call_one(version)


def weight_replicator(
    hosts: Hosts, index: int, root: Path, meshes: dict[int, ProcessMesh]
) -> WeightReplicator:
    async def spawn() -> ProcessMesh:
        group = ProcessGroup(name=f"weights{index}", ranks=1, threads=1, host=index)
        meshes[index] = await spawn_processes(group, log_dir=root, hosts=hosts)
        return meshes[index]

    spec = WeightHostSpec(
        name=f"host {index}",
        run_dir=root / f"run{index}",
        log_dir=root,
        weight_sync=WeightSyncConfig(timeout_s=_TIMEOUT_S),
        trace_dir=None,
    )
    return WeightReplicator(spec, spawn)


async def attached(addresses: Sequence[str]) -> list[Host]:
    meshes = [attach_to_workers(ca="trust_all_connections", workers=[one]) for one in addresses]
    for mesh in meshes:
        await mesh.initialized
    return [
        Host(index=index, name=address, ip="127.0.0.1", mesh=mesh.slice(hosts=0))
        for index, address, mesh in zip(HOSTS, addresses, meshes, strict=True)
    ]


def spawn_reader(host: Any, name: str) -> Any:
    return spawn_process(host, name).spawn(name, ReaderActor)


def spawn_process(host: Any, name: str) -> Any:
    return host.spawn_procs(per_host={"p": 1}, name=name, bootstrap_command=start_command({}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
