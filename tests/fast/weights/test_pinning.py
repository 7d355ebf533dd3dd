"""Which memory is registered with CUDA, and when it is released."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights import shm
from torchtitan_rl.weights.distribution import SharedMemoryHandle
from torchtitan_rl.weights.image import plan_image, whole_parts, write_image
from torchtitan_rl.weights.pinning import HostPins
from torchtitan_rl.weights.remote import PartPublisher
from torchtitan_rl.weights.shm import (
    SegmentReader,
    SegmentWriter,
    SharedMemoryPublisher,
    WeightStaging,
)

REFUSED = 801  # cudaErrorNotSupported
NONE: frozenset[int] = frozenset()


class FakeCuda:
    """CUDA's runtime. Like the driver, it writes to each page that it registers."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  # sizes by address
        self.num_registrations = 0
        self.devices: set[int] = set()
        self.refuses = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        assert address not in self.registered
        if self.refuses:
            return REFUSED
        for page in range(address, address + size, mmap.PAGESIZE):
            byte = ctypes.c_char.from_address(page)
            byte.value = byte.value
        self.registered[address] = size
        self.num_registrations += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        size = self.registered.pop(address)
        assert any(start <= address and address + size <= end for start, end in mapped_ranges()), (
            "released after it was unmapped"
        )
        return 0


def mapped_ranges() -> Iterator[tuple[int, int]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = line.split(" ", 1)[0].split("-")
        yield int(start, 16), int(end, 16)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "set_device", fake.devices.add)
    return fake


@pytest.fixture
def publisher(cuda: FakeCuda, tmp_path: Path) -> SharedMemoryPublisher:
    return SharedMemoryPublisher(
        "run", tmp_path / "run", root=tmp_path / "shm", pins=HostPins(device=3)
    )


def weights(value: float, size: int = 3000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), value)}


def test_publisher_and_reader_register_each_segment_once_for_many_versions(
    cuda: FakeCuda, publisher: SharedMemoryPublisher
) -> None:
    staging = WeightStaging(HostPins(device=1))
    for version in range(1, 13):
        staging.stage(publisher.publish(version, weights(version)))
        staging.discard_before(version)
        assert torch.equal(staging.tensors(version)["w"], weights(version)["w"])
    assert cuda.num_registrations == len(cuda.registered) <= 6
    assert cuda.devices == {1, 3}


def test_what_is_removed_is_released_before_it_is_unmapped(
    cuda: FakeCuda, publisher: SharedMemoryPublisher
) -> None:
    staging = WeightStaging(HostPins(device=0))
    for version in range(1, 5):
        staging.stage(publisher.publish(version, weights(version)))
    publisher.publish(5, weights(5, size=5000))  # no segment of this size
    publisher.publish(6, weights(6, size=5000))
    publisher.close()
    staging.discard_before(7)
    staging._segments.examine()
    assert cuda.registered == {}
    assert cuda.num_registrations >= 6


def test_the_memory_that_another_rank_writes_into_is_registered_and_released(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    publisher = SharedMemoryPublisher("run", tmp_path / "run", root=tmp_path / "shm")
    writer = SegmentWriter(HostPins(device=1))
    for version in range(6):
        layout = plan_image(weights(version), version)
        begun = publisher.begin(layout, NONE)
        write_image(layout, weights(version), writer.image(begun.path))
        publisher.finish(layout, begun)
    assert cuda.num_registrations == len(cuda.registered) == 2
    publisher.close()
    with pytest.raises(FileNotFoundError):
        writer.image(begun.path)
    assert cuda.registered == {}


def test_an_error_releases_what_it_leaves(
    cuda: FakeCuda, publisher: SharedMemoryPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = publisher.publish(1, weights(1))
    staging, num_held = WeightStaging(HostPins(device=0)), len(cuda.registered)
    for wrong in (
        SharedMemoryHandle(version=2, path=handle.path, num_bytes=handle.num_bytes),
        SharedMemoryHandle(version=1, path=handle.path, num_bytes=5),
    ):
        with pytest.raises(WeightSyncError):
            staging.stage(wrong)
    Path(handle.path).unlink()
    staging._segments.examine()
    assert len(cuda.registered) == num_held

    def fail(*args: object) -> None:
        raise RuntimeError("lost the device")

    monkeypatch.setattr(shm, "write_image", fail)
    with pytest.raises(RuntimeError, match="lost the device"):
        publisher.publish(2, weights(2))
    assert len(cuda.registered) == num_held
    publisher.close()
    assert cuda.registered == {}


def test_a_map_that_cannot_be_reused_is_released(
    cuda: FakeCuda, publisher: SharedMemoryPublisher
) -> None:
    path = Path(publisher.publish(1, weights(1)).path)
    reader, num_held = SegmentReader(HostPins(device=0)), len(cuda.registered)
    images = [reader.image(path), reader.image(path)]  # two maps of one file
    assert len(cuda.registered) == num_held + 2
    images.clear()
    assert reader.examine() == 1
    assert len(cuda.registered) == num_held + 1
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            reader.image(path)
    assert len(cuda.registered) == num_held


class Offers:
    """Refuses the second registration."""

    def __init__(self) -> None:
        self.num_offers = 0
        self.offered: set[int] = set()

    def offer(self, memory: torch.Tensor) -> tuple[int, ...]:
        self.num_offers += 1
        if self.num_offers == 2:
            raise WeightSyncError("no room")
        self.offered.add(self.num_offers)
        return (self.num_offers,)

    def withdraw(self, buffers: Sequence[int]) -> None:
        self.offered -= set(buffers)


def test_packed_memory_is_registered_once_and_released_at_close(cuda: FakeCuda) -> None:
    offers = Offers()
    publisher = PartPublisher(offers, owner="rank 0", pins=HostPins(device=0))
    for version in range(12):
        with suppress(WeightSyncError):
            publisher.publish(version, whole_parts(weights(version)), keep=NONE)
        assert len(cuda.registered) == len(offers.offered)
    assert (cuda.num_registrations, offers.num_offers) == (3, 3)
    assert len(offers.offered) == 2
    publisher.publish(12, whole_parts(weights(12, size=5000)), keep=NONE)
    publisher.close()
    assert cuda.registered == {}
    assert offers.offered == set()


def test_memory_that_cuda_refuses_is_used_all_the_same(
    cuda: FakeCuda, publisher: SharedMemoryPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuses = True
    staging = WeightStaging(HostPins(device=0))
    for version in range(1, 7):
        staging.stage(publisher.publish(version, weights(version)))
        staging.discard_before(version)
        assert torch.equal(staging.tensors(version)["w"], weights(version)["w"])
    publisher.close()
    assert f"cannot be pinned (CUDA error {REFUSED})" in caplog.text


def test_without_a_cuda_device_nothing_is_registered(cuda: FakeCuda) -> None:
    pins = HostPins()
    pins.pin(torch.zeros(8, dtype=torch.uint8))
    pins.close()
    assert cuda.num_registrations == 0
    assert cuda.devices == set()
