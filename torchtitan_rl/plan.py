"""Which processes a run has, where they run and with what: decided before any of them starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """Processes that start and step together: one replica's ranks, or the trainer's."""

    name: str
    ranks: int
    threads: int  # OMP threads of each rank
    devices: tuple[int, ...] = ()  # CUDA devices, one a rank; empty on the CPU
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """All processes but the controller, which is the one that plans."""

    device: Literal["cpu", "cuda"]
    replicas: tuple[ProcessGroup, ...]
    trainer: ProcessGroup

    def describe(self) -> str:
        """The plan as lines for a person."""
        lines = [f"device: {self.device}", "controller: 1 process"]
        for group in (*self.replicas, self.trainer):
            where = f"cuda:{','.join(map(str, group.devices))}" if group.devices else "cpu"
            lines.append(
                f"{group.name}: {group.ranks} process{'es' if group.ranks > 1 else ''} on {where}, "
                f"{group.threads} thread{'s' if group.threads > 1 else ''} each"
            )
        return "\n".join(lines)


def replica_name(index: int) -> str:
    return f"replica{index}"


def num_devices_needed(config: RunConfig) -> int:
    """CUDA devices of a run: one for each rank, generators first."""
    generator = config.generator
    return generator.replicas * generator.tensor_parallel + config.trainer.world_size


def plan_processes(config: RunConfig, *, num_cuda_devices: int) -> ProcessPlan:
    """Generators take the first devices, the trainer the next; without CUDA all share the CPU."""
    on_cuda = num_cuda_devices > 0
    next_device = 0

    def take(ranks: int) -> tuple[int, ...]:
        nonlocal next_device
        if not on_cuda:
            return ()
        devices = tuple(range(next_device, next_device + ranks))
        next_device += ranks
        return devices

    replicas = tuple(
        ProcessGroup(
            name=replica_name(index),
            ranks=config.generator.tensor_parallel,
            threads=config.generator.threads,
            devices=take(config.generator.tensor_parallel),
            # Replicas with equal seeds would share their noise.
            seed=config.seed * 1000 + index,
        )
        for index in range(config.generator.replicas)
    )
    trainer = ProcessGroup(
        name="trainer",
        ranks=config.trainer.world_size,
        threads=config.trainer.threads,
        devices=take(config.trainer.world_size),
        seed=config.seed,
    )
    return ProcessPlan(device="cuda" if on_cuda else "cpu", replicas=replicas, trainer=trainer)
