"""Two gloo ranks that write versions into shared memory together."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.real.trainer_helpers import free_ports, run_ranks
from torchtitan_rl.backends.monarch.trainer_rank import JointPublisher
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.distribution import SharedMemoryHandle
from torchtitan_rl.weights.image import TensorPart
from torchtitan_rl.weights.shm import SharedMemoryPublisher, WeightStaging

SHAPE = torch.Size([4, 1000])
NONE: frozenset[int] = frozenset()


def half(rank: int, version: int, *, num_rows: int = 2) -> dict[str, TensorPart]:
    local = torch.full((num_rows, 1000), float(10 * version + rank))
    part = TensorPart(shape=SHAPE, dtype=torch.float32, offset=(2 * rank, 0), local=local)
    return {"w": part}


def check_rows(staging: WeightStaging, handle: SharedMemoryHandle) -> None:
    staging.stage(handle)
    rows = staging.tensors(handle.version)["w"][:, 0].tolist()
    first = 10.0 * handle.version
    assert rows == [first, first, first + 1, first + 1]


def one_rank(rank: int, port: int, root: Path) -> None:
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    shared = SharedMemoryPublisher("joint", root / "run", root=root / "shm") if rank == 0 else None
    publisher, staging = JointPublisher(shared), WeightStaging()

    for version in range(4):
        handle = publisher.publish(version, half(rank, version), keep=NONE)
        assert (handle is None) == (rank == 1)
        if handle is not None:
            check_rows(staging, handle)
            staging.discard_before(version)

    too_many = half(rank, 4, num_rows=2 + rank)
    if rank == 0:
        with pytest.raises(WeightSyncError, match="version 4 cannot be written: rank 1: "):
            publisher.publish(4, too_many, keep=NONE)
        assert handle is not None
        check_rows(WeightStaging(), handle)
        assert [path.name for path in root.rglob("v*")] == ["v3.safetensors"]
    else:
        assert publisher.publish(4, too_many, keep=NONE) is None

    full = namedtuple("Usage", "total used free")(1, 1, 0)
    with patch.object(shutil, "disk_usage", lambda _: full):
        if rank == 0:
            with pytest.raises(WeightSyncError, match="version 5 cannot be published: "):
                publisher.publish(5, half(rank, 5), keep=NONE)
        else:
            assert publisher.publish(5, half(rank, 5), keep=NONE) is None

    last = publisher.publish(6, half(rank, 6), keep=NONE)
    if last is not None:
        check_rows(staging, last)
    dist.barrier()
    dist.destroy_process_group()


def test_versions_are_whole_and_one_that_a_rank_cannot_write_is_never_visible(
    tmp_path: Path,
) -> None:
    run_ranks(one_rank, 2, free_ports(1)[0], tmp_path)
