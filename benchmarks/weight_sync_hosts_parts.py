"""The processes of `weight_sync_hosts`: trainer ranks that publish, hosts that fetch, readers."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchtitan_rl.backends.monarch  # noqa: F401  (before Monarch)

# isort: split
from monarch.actor import Actor, attach_to_workers, concurrent_endpoint, current_rank

from benchmarks.weight_sync_session import ROW_LEN
from torchtitan_rl.backends.monarch.hosts import Host, Hosts, local_host, start_command
from torchtitan_rl.backends.monarch.runtime import spawn_processes, stop_processes
from torchtitan_rl.backends.monarch.weight_replicator import (
    RdmaOffers,
    RdmaReader,
    weight_replicator,
)
from torchtitan_rl.backends.specs import WeightHostSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.launch.interfaces import free_port
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.weights.config import WeightSyncConfig
from torchtitan_rl.weights.distribution import (
    RemoteMemoryHandle,
    RemoteSource,
    SharedMemoryHandle,
    WeightDistribution,
)
from torchtitan_rl.weights.image import whole_parts
from torchtitan_rl.weights.remote import PartPublisher
from torchtitan_rl.weights.shm import WeightStaging

READERS = 2  # on each host
_WORKER = "torchtitan_rl.backends.monarch.worker_loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    policy: str
    ranks: int = 1
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    handle: RemoteMemoryHandle
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The results of one distribution. ``seconds``: until the last reader of all hosts had the
    version."""

    seconds: float
    slowest_fetch_s: float
    num_bytes: tuple[int, ...]  # number of bytes of each fetch


class TrainerSide(Actor):
    """One rank of a trainer."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._thread = ThreadPoolExecutor(1)

    @concurrent_endpoint
    async def run(self, method: str, *arguments: Any) -> Any:
        work = functools.partial(contextvars.copy_context().run, getattr(self, method), *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def build(self) -> None:
        from torchtitan_rl.backends.titan.trainer import PolicyTrainer

        setting = self._setting
        config = TrainerConfig(
            data_parallel_shard=setting.ranks,
            max_episode_tokens=ROW_LEN,
            max_tokens_per_microbatch=ROW_LEN,
            threads=setting.threads,
        )
        self._trainer = PolicyTrainer(Path(setting.policy), config, seed=0, max_steps=1000)
        rank = f"trainer rank {current_rank().rank}"
        self._publisher = PartPublisher(RdmaOffers(), owner=rank)

    def publish(self, version: int, dtype: str, gathers: bool) -> Published | None:
        from torchtitan_rl.backends.monarch.trainer_rank import publish_parts

        kind: torch.dtype = getattr(torch, dtype)
        started = time.perf_counter()
        parts = None if gathers else self._trainer.hf_parts()
        if parts is None:
            parts = whole_parts(self._trainer.hf_state_dict())
        parts = {name: dataclasses.replace(part, dtype=kind) for name, part in parts.items()}
        handle = publish_parts(self._publisher, version, parts, frozenset({version - 2}), None)
        seconds = time.perf_counter() - started
        return None if handle is None else Published(handle=handle, seconds=seconds)

    def close(self) -> None:
        self._publisher.close()
        self._trainer.close()


class Publisher:
    """All ranks of the trainer together. Each published version has a new number."""

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks
        self._version = 0

    @classmethod
    @asynccontextmanager
    async def spawn(cls, setting: Setting, work_dir: Path) -> AsyncIterator[Publisher]:
        group = ProcessGroup(name="trainer", ranks=setting.ranks, threads=setting.threads)
        mesh = await spawn_processes(group, log_dir=work_dir)
        try:
            ranks: Any = mesh.mesh.spawn("trainer", TrainerSide, setting)
            await ranks.run.call("build")
            yield cls(ranks)
            await ranks.run.call("close")
        finally:
            await stop_processes(mesh)

    async def publish(self, dtype: str, *, gathers: bool = False) -> Published:
        self._version += 1
        answers = await self._ranks.run.call("publish", self._version, dtype, gathers)
        return answers.item(ranks=0)


class ReaderSide(Actor):
    def __init__(self) -> None:
        self._staging = WeightStaging()
        self._read = RdmaReader(timeout_s=300.0)
        self._memory = torch.empty(0, dtype=torch.uint8)

    @concurrent_endpoint
    async def stage(self, handle: SharedMemoryHandle) -> None:
        await asyncio.to_thread(self._staging.stage, handle)
        self._staging.discard_before(handle.version)

    @concurrent_endpoint
    async def read(self, source: RemoteSource) -> float:
        """Read the bytes into existing memory, and do nothing else. Returns the seconds."""
        if self._memory.numel() != source.num_bytes:
            self._memory = torch.zeros(source.num_bytes, dtype=torch.uint8)
        started = time.perf_counter()
        await asyncio.to_thread(self._read, source.buffers, self._memory)
        return time.perf_counter() - started


class FetchingHosts:
    def __init__(self, hosts: Hosts, indices: Sequence[int], work_dir: Path) -> None:
        self._fetchers = {
            index: weight_replicator(
                ProcessGroup(name=f"weights{index}", ranks=1, threads=1, host=index),
                WeightHostSpec(
                    name=f"host {index}",
                    run_dir=work_dir / f"host{index}",
                    log_dir=work_dir,
                    weight_sync=WeightSyncConfig(),
                    trace_dir=None,
                ),
                hosts,
            )
            for index in indices
        }
        self._readers: dict[int, list[Any]] = {
            index: [
                hosts[index]
                .mesh.spawn_procs(per_host={"p": 1}, bootstrap_command=start_command({}))
                .spawn("reader", ReaderSide)
                for _ in range(READERS)
            ]
            for index in indices
        }

    async def start(self) -> None:
        await asyncio.gather(*(fetcher.start() for fetcher in self._fetchers.values()))

    async def reach(self, handle: RemoteMemoryHandle, *, fan_out: int) -> Reached:
        """Have all readers of all hosts ask for the version at once."""
        weights = WeightDistribution(self._fetchers, fan_out=fan_out)

        async def stage(index: int, reader: Any) -> None:
            await reader.stage.call_one(await weights.ensure_on_host(handle, index))

        started = time.perf_counter()
        await asyncio.gather(
            *(stage(index, one) for index, readers in self._readers.items() for one in readers)
        )
        seconds = time.perf_counter() - started
        fetches = weights.take_fetches()
        return Reached(
            seconds=seconds,
            slowest_fetch_s=max(fetched.seconds for fetched in fetches),
            num_bytes=tuple(fetched.num_bytes for fetched in fetches),
        )

    async def read(self, handle: RemoteMemoryHandle) -> float:
        """Have one process of the first host read the only source. Returns the seconds."""
        (source,) = handle.sources
        return await next(iter(self._readers.values()))[0].read.call_one(source)

    async def close(self) -> None:
        await asyncio.gather(*(fetcher.close() for fetcher in self._fetchers.values()))


@asynccontextmanager
async def worker_hosts(number: int, work_dir: Path) -> AsyncIterator[FetchingHosts]:
    """Start hosts 1 to ``number``, as workers on loopback addresses. Host 0 is the host of this
    process."""
    names = [f"127.0.0.{index + 2}" for index in range(number)]
    addresses = [f"tcp://{name}:{free_port(name)}" for name in names]
    with _workers(addresses):
        meshes = [attach_to_workers(ca="trust_all_connections", workers=[one]) for one in addresses]
        for mesh in meshes:
            await mesh.initialized
        attached = [
            Host(index=index, name=address, ip=name, mesh=mesh.slice(hosts=0))
            for index, (address, name, mesh) in enumerate(
                zip(addresses, names, meshes, strict=True), start=1
            )
        ]
        hosts = FetchingHosts(
            Hosts([local_host(0), *attached]), [host.index for host in attached], work_dir
        )
        await hosts.start()
        yield hosts
        await hosts.close()


@contextmanager
def _workers(addresses: Sequence[str]) -> Iterator[None]:
    workers = [subprocess.Popen([sys.executable, "-m", _WORKER, one]) for one in addresses]
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
