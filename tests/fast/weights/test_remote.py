"""Parts of several processes become one verified image in another host's shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.distribution import RemoteMemoryHandle, SharedMemoryHandle
from torchtitan_rl.weights.image import TensorPart, plan_image, whole_parts
from torchtitan_rl.weights.remote import PartPublisher, WeightReceiver
from torchtitan_rl.weights.shm import SharedMemoryPublisher, WeightStaging

NONE: frozenset[int] = frozenset()
Tensors = dict[str, torch.Tensor]


@dataclass
class Memory:
    """Buffers are numbers of slices of 100,000 bytes. ``damage``: reads that flip a byte."""

    offered: dict[int, torch.Tensor] = field(default_factory=dict)
    number: int = 0
    num_read: int = 0
    damage: list[int] = field(default_factory=list)

    def offer(self, memory: torch.Tensor) -> tuple[int, ...]:
        buffers = []
        for part in memory.split(100_000):
            self.number += 1
            self.offered[self.number] = part
            buffers.append(self.number)
        return tuple(buffers)

    def withdraw(self, buffers: Sequence[int]) -> None:
        for buffer in buffers:
            del self.offered[buffer]

    def read(self, buffers: Sequence[int], memory: torch.Tensor) -> None:
        for buffer in buffers:
            if buffer not in self.offered:
                raise WeightSyncError("it is gone")
        content = torch.cat([self.offered[buffer] for buffer in buffers])
        assert content.numel() == memory.numel()
        memory.copy_(content)
        self.num_read += 1
        if self.num_read in self.damage:
            memory[memory.numel() // 2] ^= 1


@pytest.fixture
def memory() -> Memory:
    return Memory()


def weights(version: int) -> Tensors:
    """A sharded matrix, one that is split by columns, a scalar, bf16, an empty tensor."""
    generator = torch.Generator().manual_seed(7)
    change = 1 + 1e-6 * version
    return {
        "embed": torch.randn(300, 200, generator=generator) * change,
        "down": torch.randn(40, 64, generator=generator) * change,
        "norm": (torch.randn(7, generator=generator) * change).bfloat16(),
        "scale": torch.tensor(3.0 * change),
        "none": torch.zeros(0, 4),
    }


def parts_of_rank(tensors: Tensors, rank: int) -> dict[str, TensorPart]:
    """Of two ranks: rows of ``embed``, columns of ``down``; rank 0 has the rest."""

    def part(name: str, local: torch.Tensor | None, *offset: int) -> TensorPart:
        whole = tensors[name]
        return TensorPart(shape=whole.shape, dtype=whole.dtype, offset=offset, local=local)

    def first(name: str) -> TensorPart:
        local = tensors[name] if rank == 0 else None
        return part(name, local, *(0,) * tensors[name].dim())

    return {
        "embed": part("embed", tensors["embed"][150 * rank : 150 * (rank + 1)], 150 * rank, 0),
        "down": part("down", tensors["down"][:, 32 * rank : 32 * (rank + 1)], 0, 32 * rank),
        **{name: first(name) for name in ("norm", "scale", "none")},
    }


class Trainer:
    def __init__(self, memory: Memory, *, ranks: int = 2) -> None:
        self.ranks = [PartPublisher(memory, owner=f"trainer rank {rank}") for rank in range(ranks)]

    def publish(self, version: int, keep: frozenset[int] = NONE) -> RemoteMemoryHandle:
        tensors = weights(version)
        sources = []
        for number, rank in enumerate(self.ranks):
            one = len(self.ranks) == 1
            parts = whole_parts(tensors) if one else parts_of_rank(tensors, number)
            sources.append(rank.publish(version, parts, keep=keep))
        return RemoteMemoryHandle(
            layout=plan_image(tensors, version),
            sources=tuple(source for source in sources if source is not None),
            keep=keep,
        )


def receiver(memory: Memory, folder: Path, name: str = "host 1") -> WeightReceiver:
    shared = SharedMemoryPublisher(name, folder / name / "run", root=folder / name / "shm")
    return WeightReceiver(shared, memory.read, memory, host=name)


def assert_holds(handle: SharedMemoryHandle, version: int) -> None:
    staging = WeightStaging()
    staging.stage(handle)
    found, expected = staging.tensors(version), weights(version)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_host_assembles_what_the_ranks_offer(memory: Memory, tmp_path: Path, ranks: int) -> None:
    trainer, host = Trainer(memory, ranks=ranks), receiver(memory, tmp_path)
    for version in range(5):
        handle = trainer.publish(version)
        fetched = host.fetch(handle, None)
        assert_holds(fetched.handle, version)
        assert fetched.num_bytes == handle.num_bytes - len(handle.layout.header)


def test_a_host_offers_what_it_has_to_others(memory: Memory, tmp_path: Path) -> None:
    trainer, first = Trainer(memory), receiver(memory, tmp_path)
    second = receiver(memory, tmp_path, "host 2")
    for version in range(4):
        handle = trainer.publish(version)
        first.fetch(handle, None)
        parent = first.offer(version)
        assert parent is first.offer(version)
        fetched = second.fetch(handle, parent)
        assert_holds(fetched.handle, version)
    with pytest.raises(WeightSyncError, match="version 0 is not on host 1 any more"):
        first.offer(0)


def test_a_released_version_is_refused_and_close_withdraws_all_memory(
    memory: Memory, tmp_path: Path
) -> None:
    trainer, host = Trainer(memory, ranks=1), receiver(memory, tmp_path)
    handles = []
    for version in range(3):
        handles.append(trainer.publish(version))
        host.fetch(handles[-1], None)
        host.offer(version)
    for late in (0, 1):
        trainer.publish(3 + late, keep=frozenset({2}))
        with pytest.raises(WeightSyncError, match="or trainer rank 0 has replaced the version"):
            receiver(memory, tmp_path, "host 2").fetch(handles[late], None)
    assert_holds(receiver(memory, tmp_path, "host 3").fetch(handles[2], None).handle, 2)
    host.close()
    for rank in trainer.ranks:
        rank.close()
    assert memory.offered == {}


def test_a_rank_packs_later_versions_into_the_memory_of_released_ones(
    memory: Memory, tmp_path: Path
) -> None:
    trainer, host = Trainer(memory), receiver(memory, tmp_path)
    seen = set()
    for version in range(8):
        handle = trainer.publish(version)
        seen.add(handle.sources[0].buffers)
        assert_holds(host.fetch(handle, None).handle, version)
    assert len(seen) == 2  # the current version and the one before
    offered = [trainer.publish(version).sources for version in (8, 9)]
    assert memory.offered.keys() == {
        buffer for sources in offered for source in sources for buffer in source.buffers
    }


def test_versions_that_are_kept_stay_readable(memory: Memory, tmp_path: Path) -> None:
    trainer, host = Trainer(memory), receiver(memory, tmp_path)
    keep = frozenset({1})
    fetched = {v: host.fetch(trainer.publish(v, keep), None).handle for v in range(5)}
    for version in (1, 3, 4):
        assert_holds(fetched[version], version)
    assert list(trainer.ranks[0]._held) == [1, 3, 4]
    with pytest.raises(WeightSyncError, match="version 2: cannot map"):
        assert_holds(fetched[2], 2)


def test_a_damaged_part_is_read_once_more(memory: Memory, tmp_path: Path) -> None:
    trainer, host = Trainer(memory, ranks=1), receiver(memory, tmp_path)
    memory.damage = [1]
    handle = trainer.publish(3)
    fetched = host.fetch(handle, None)
    assert_holds(fetched.handle, 3)
    assert fetched.num_bytes == 2 * (handle.num_bytes - len(handle.layout.header))


def test_a_part_that_stays_damaged_is_named(memory: Memory, tmp_path: Path) -> None:
    trainer, host = Trainer(memory, ranks=1), receiver(memory, tmp_path)
    memory.damage = [1, 2]
    message = "version 3: embed arrived damaged twice at host 1 from trainer rank 0"
    with pytest.raises(WeightSyncError, match=message):
        host.fetch(trainer.publish(3), None)
    assert list(tmp_path.rglob("*.safetensors")) == []
    assert_holds(host.fetch(trainer.publish(4), None).handle, 4)
