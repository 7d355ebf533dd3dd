"""Each version reaches each host once, whoever asks, whatever fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.support.async_tests import on_virtual_clock
from tests.support.await_faults import Faults, InjectedError, Kind
from tests.support.virtual_clock import VirtualLoop
from torchtitan_rl.errors import ReplicaError, WeightSyncError
from torchtitan_rl.weights.distribution import (
    Fetched,
    RemoteMemoryHandle,
    RemoteSource,
    SharedMemoryHandle,
    SourceLostError,
    WeightDistribution,
)
from torchtitan_rl.weights.image import plan_image

TRAINER = "trainer rank 0"


def handle(version: int, **more: object) -> RemoteMemoryHandle:
    source = RemoteSource(owner=TRAINER, parts=(), buffers=(), num_bytes=0)
    layout = plan_image({"w": torch.zeros(3)}, version)
    return RemoteMemoryHandle(layout=layout, sources=(source,), **more)  # type: ignore[arg-type]


@dataclass
class Network:
    """Hosts that take a second for each fetch, and who reads from whom."""

    fetches: list[tuple[str, str, int]] = field(default_factory=list)  # host, source, version
    reading: Counter[str] = field(default_factory=Counter)
    most_at_once: Counter[str] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)
    cut_off: set[str] = field(default_factory=set)  # who asks them waits without end

    def hosts(self, number: int) -> dict[int, Host]:
        return {index: Host(self, f"host {index}") for index in range(number)}

    async def reach(self, name: str) -> None:
        if name in self.cut_off:
            await asyncio.Event().wait()


@dataclass
class Host:
    network: Network
    name: str

    async def fetch(self, handle: RemoteMemoryHandle, parent: RemoteSource | None) -> Fetched:
        source = TRAINER if parent is None else parent.owner
        self.network.fetches.append((self.name, source, handle.version))
        self.network.reading[source] += 1
        self.network.most_at_once |= self.network.reading
        try:
            await asyncio.sleep(1.0)
            await self.network.reach(source)
        finally:
            self.network.reading[source] -= 1
        if self.name in self.network.lost:
            raise ReplicaError(f"{self.name} is lost")
        if source in self.network.lost:
            raise WeightSyncError(f"version {handle.version}: {source} is lost")
        path = f"/{self.name}/v{handle.version}"
        shared = SharedMemoryHandle(version=handle.version, path=path, num_bytes=9)
        return Fetched(handle=shared, num_bytes=9, seconds=1.0)

    async def offer(self, version: int) -> RemoteSource:
        await asyncio.sleep(0.1)
        await self.network.reach(self.name)
        return RemoteSource(owner=self.name, parts=(), buffers=(), num_bytes=9)


@on_virtual_clock
async def test_replicas_of_a_host_share_one_fetch() -> None:
    network = Network()
    weights = WeightDistribution(network.hosts(2), fan_out=2)
    asked = [weights.ensure_on_host(handle(4), host) for host in (0, 1) for _ in range(5)]
    paths = [shared.path for shared in await asyncio.gather(*asked)]
    assert paths == ["/host 0/v4"] * 5 + ["/host 1/v4"] * 5
    assert sorted(network.fetches) == [("host 0", TRAINER, 4), ("host 1", TRAINER, 4)]
    assert [fetched.num_bytes for fetched in weights.take_fetches()] == [9, 9]
    assert weights.take_fetches() == ()


@on_virtual_clock
async def test_the_trainers_own_host_maps_its_memory() -> None:
    weights = WeightDistribution({}, fan_out=2)
    shared = SharedMemoryHandle(version=4, path="/own", num_bytes=9)
    assert await weights.ensure_on_host(shared, 0) is shared
    assert await weights.ensure_on_host(handle(4, shared=shared), 0) is shared
    with pytest.raises(WeightSyncError, match="version 4: nothing fetches for host 3"):
        await weights.ensure_on_host(handle(4), 3)


@on_virtual_clock
@pytest.mark.parametrize("is_reading", [False, True])
async def test_a_trainer_that_is_lost_while_nobody_needs_it_is_started_for_a_reader(
    is_reading: bool,
) -> None:
    weights = WeightDistribution({}, fan_out=0)
    wanted: list[float] = []

    def lose() -> None:
        now = asyncio.get_running_loop().time
        weights.lose_source(on_wanted=lambda: wanted.append(now()))

    async def read(_: SharedMemoryHandle) -> None:
        await asyncio.sleep(1.0)
        raise WeightSyncError("the memory is gone")

    lost_s = 0.5 if is_reading else 0.0
    asyncio.get_running_loop().call_later(lost_s, lose)
    await asyncio.sleep(0.0 if is_reading else 0.1)
    with pytest.raises(SourceLostError) as raised:
        await weights.read(SharedMemoryHandle(version=1, path="", num_bytes=1), 0, read)
    assert wanted == [pytest.approx(1.0 if is_reading else 0.1)]
    assert not raised.value.renewed.is_set()
    weights.renew_source({})
    assert raised.value.renewed.is_set()


@pytest.mark.parametrize("fan_out", [0, 2])
def test_many_hosts_fetch_in_a_tree(fan_out: int) -> None:
    network = Network()
    weights = WeightDistribution(network.hosts(16), fan_out=fan_out)

    @on_virtual_clock
    async def fetch_all() -> None:
        await asyncio.gather(*(weights.ensure_on_host(handle(1), host) for host in range(16)))

    fetch_all()
    assert sorted(host for host, _, _ in network.fetches) == sorted(
        f"host {index}" for index in range(16)
    )
    if fan_out:
        assert max(network.most_at_once.values()) == fan_out
        assert len(network.most_at_once) > 4  # most hosts read from another host
    else:
        assert network.most_at_once == {TRAINER: 16}


@pytest.mark.parametrize("after_s", [0.05, 0.5])  # while it is asked, while it is read
def test_a_host_reads_from_the_trainer_when_its_parent_is_cut_off(after_s: float) -> None:
    @on_virtual_clock
    async def lose_the_parent() -> None:
        network = Network()
        weights = WeightDistribution(network.hosts(3), fan_out=1)
        await weights.ensure_on_host(handle(1), 0)
        reading = asyncio.create_task(weights.ensure_on_host(handle(1), 1))
        await asyncio.sleep(after_s)
        network.cut_off.add("host 0")
        await asyncio.sleep(15.0)
        assert not reading.done()
        weights.replace(0, Host(network, "host 0 again"))
        assert (await asyncio.wait_for(reading, 600)).path == "/host 1/v1"
        shared = await asyncio.gather(*(weights.ensure_on_host(handle(1), host) for host in (0, 2)))
        assert [one.path for one in shared] == ["/host 0 again/v1", "/host 2/v1"]
        assert ("host 1", TRAINER, 1) in network.fetches
        assert not network.reading.total()

    lose_the_parent()


def watched(path: str) -> bool:
    return Path(path).name in ("distribution.py", Path(__file__).name)


async def life(faults: Faults) -> None:
    """Two versions for four hosts of two replicas; ends with the invariants."""
    network = Network()
    weights = WeightDistribution(network.hosts(4), fan_out=2)
    asyncio.get_running_loop().set_task_factory(faults.factory)  # type: ignore[arg-type]
    faults.is_counting = True
    for version in range(2):
        newest = handle(version)
        asked = [
            asyncio.create_task(weights.ensure_on_host(newest, host))
            for host in range(4)
            for _ in range(2)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for host, answer in zip(
            (host for host in range(4) for _ in range(2)), answers, strict=True
        ):
            if isinstance(answer, SharedMemoryHandle):
                assert answer.path == f"/host {host}/v{version}"
            else:
                assert isinstance(answer, InjectedError | asyncio.CancelledError | WeightSyncError)
    faults.is_counting = False
    for host in range(4):  # whatever failed, the next one to ask gets it
        assert (await weights.ensure_on_host(newest, host)).path == f"/host {host}/v1"
    fetched = Counter((host, version) for host, _, version in network.fetches)
    assert all(count <= 2 for count in fetched.values())
    assert sum(count - 1 for count in fetched.values()) <= 1
    assert max(network.most_at_once.values()) <= 2
    await weights.close()


def run_life(faults: Faults) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(asyncio.wait_for(life(faults), 600))
    finally:
        loop.close()


@pytest.mark.parametrize("kind", Kind)
def test_a_fault_at_any_await_costs_at_most_one_fetch(kind: Kind) -> None:
    counting = Faults(watches=watched)
    run_life(counting)
    assert len(counting.sites) > 30
    first_of_each = {site: number for number, site in reversed(list(enumerate(counting.sites)))}
    for number in first_of_each.values():
        run_life(Faults(watches=watched, number=number, kind=kind))
