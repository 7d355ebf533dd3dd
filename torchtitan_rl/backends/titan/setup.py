"""Prepares torchtitan for building a model: device, process group, meshes.

Import this module before any module of torchtitan, in every process. torchtitan's modules copy the
name of the device when they are imported. Without an accelerator, this module sets that name to
``cpu`` before they do.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.training.config import TrainerConfig

if not torch.accelerator.is_available():
    _copied = sys.modules.get("torchtitan.distributed.parallel_dims")
    if _copied is not None and _copied.device_type != "cpu":
        raise ImportError("import torchtitan_rl.backends.titan.setup before torchtitan's modules")
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

# isort: split
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

# torchtitan's default backend fails under FSDP of torch 2.13 with more than one process.
SPMD_BACKEND = "partial_dtensor"
# The controller's deadline passes first, and its error says what was waited for. After NCCL's, the
# process ends without a traceback.
_COLLECTIVE_GRACE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The position of this rank in the meshes. A group that would have only one rank is None."""

    device: torch.device
    parallelism: Any  # torchtitan's ParallelismConfig
    dims: Any  # torchtitan's ParallelDims
    data_rank: int
    data_ranks: int
    data_group: dist.ProcessGroup | None
    context_rank: int
    context_ranks: int
    context_group: dist.ProcessGroup | None
    tensor_group: dist.ProcessGroup | None
    owns_process_group: bool


def set_up(config: TrainerConfig) -> Layout:
    """Join the process group that torchrun's environment variables describe (without them, a group
    of one rank), and build torchtitan's meshes. Raises ValueError: the world size differs from that
    of the configuration."""
    device = _device()
    timeout = timedelta(seconds=config.step_timeout_s + _COLLECTIVE_GRACE_S)
    owns = not dist.is_initialized()
    # Before this process joins a group, in which a refused trainer would leave it.
    launched = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    ranks = launched if owns else dist.get_world_size()
    if ranks != config.world_size:
        raise ValueError(
            f"the trainer is configured for {config.world_size} ranks and runs on {ranks}"
        )
    if owns:
        _join(device, timeout)
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=config.data_parallel_replicate,
        # torchtitan's context parallelism is another one; its weights are sharded alike.
        data_parallel_shard_degree=config.num_shards,
        tensor_parallel_degree=config.tensor_parallel,
        expert_parallel_degree=config.expert_parallel,
        spmd_backend=SPMD_BACKEND,
    )
    set_spmd_backend(SPMD_BACKEND)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    data_ranks = config.data_parallel_replicate * config.data_parallel_shard
    mesh = init_device_mesh(
        device.type,
        (data_ranks, config.context_parallel, config.tensor_parallel),
        mesh_dim_names=("data", "context", "tensor"),
    )
    of_titan = [one.get_group() for one in dims.get_all_one_dimensional_meshes().values()]
    for group in (*of_titan, *mesh.get_all_groups()):
        # By default torch gives them 10 minutes on NCCL.
        dist.distributed_c10d._set_pg_timeout(timeout, group)

    def group_of(axis: str) -> dist.ProcessGroup | None:
        return mesh.get_group(axis) if mesh[axis].size() > 1 else None

    return Layout(
        device=device,
        parallelism=parallelism,
        dims=dims,
        data_rank=mesh.get_local_rank("data"),
        data_ranks=data_ranks,
        data_group=group_of("data"),
        context_rank=mesh.get_local_rank("context"),
        context_ranks=config.context_parallel,
        context_group=group_of("context"),
        tensor_group=group_of("tensor"),
        owns_process_group=owns,
    )


def tear_down(layout: Layout) -> None:
    if layout.owns_process_group and dist.is_initialized():
        dist.destroy_process_group()


def check_device(planned: Literal["cpu", "cuda"]) -> None:
    """Check that torch computes on the planned type of device. A driver that is too old leaves
    torch with the CPU, although the devices were counted. Raises ConfigError: it computes on
    another."""
    found = torch.accelerator.current_accelerator(check_available=True)
    name = "cpu" if found is None else found.type
    if name != planned:
        raise ConfigError(
            f"trainer: planned for {planned}, and torch {torch.__version__} computes on {name} "
            "here; run torchtitan-rl doctor, and look at CUDA_VISIBLE_DEVICES"
        )


def _device() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(titan_utils.device_type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device)
    return device


def _join(device: torch.device, timeout: timedelta) -> None:
    backend = "gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)


def local(values: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return values.to_local() if isinstance(values, DTensor) else values


def to_device(values: npt.NDArray[Any], layout: Layout) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(layout.device)
