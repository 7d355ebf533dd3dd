"""Which processes a run has, where they run and with what: decided before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.serving.config import EndpointConfig

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """Processes that start and step together: one replica's ranks, or the trainer's."""

    name: str
    ranks: int
    threads: int  # OMP threads of each rank
    devices: tuple[str, ...] = ()  # CUDA devices, one a rank, by name; empty on the CPU
    cores: tuple[int, ...] = ()  # CPU cores that no other group computes on; empty: any
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """All processes but the controller, which is the one that plans."""

    device: Literal["cpu", "cuda"]
    replicas: tuple[ProcessGroup, ...]
    trainer: ProcessGroup
    endpoint: ProcessGroup | None = None
    controller_cores: tuple[int, ...] = ()  # empty: any
    is_shared: bool = False  # trainer and replicas have the same devices, and alternate

    def summary(self) -> str:
        """What runs where, in one line: ``2 replicas on cuda:0,1, trainer on cuda:2``."""
        groups = [self.trainer, *([] if self.endpoint is None else [self.endpoint])]
        return _summary(self.replicas, *groups)

    def describe(self) -> str:
        """The plan as lines for a person."""
        endpoint = () if self.endpoint is None else (self.endpoint,)
        shared = "placement: colocated, the trainer computes while the replicas sleep"
        return "\n".join(
            [
                f"device: {self.device}",
                f"controller: 1 process on {_describe_place((), self.controller_cores)}",
                *_describe_groups((*self.replicas, self.trainer, *endpoint)),
                *([shared] if self.is_shared else []),
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """All processes of an endpoint without training, but the controller."""

    device: Literal["cpu", "cuda"]
    replicas: tuple[ProcessGroup, ...]
    endpoint: ProcessGroup

    def summary(self) -> str:
        """What runs where, in one line."""
        return _summary(self.replicas, self.endpoint)

    def describe(self) -> str:
        """The plan as lines for a person."""
        groups = _describe_groups((*self.replicas, self.endpoint))
        return "\n".join([f"device: {self.device}", "controller: 1 process on cpu", *groups])


def replica_name(index: int) -> str:
    return f"replica{index}"


def num_devices_needed(config: RunConfig) -> int:
    """CUDA devices of a run: one for each rank; colocated ones share."""
    generator = config.generator
    generating = generator.replicas * generator.tensor_parallel
    return _together(config, generating, config.trainer.world_size)


def num_threads_needed(config: RunConfig) -> int:
    """Threads that compute on the CPU at a time, in all processes but the controller."""
    generator, trainer = config.generator, config.trainer
    generating = generator.replicas * generator.tensor_parallel * generator.threads
    return _together(config, generating, trainer.world_size * trainer.threads)


def _together(config: RunConfig, generating: int, training: int) -> int:
    is_colocated = config.placement == "colocated"
    return max(generating, training) if is_colocated else generating + training


def plan_processes(
    config: RunConfig, *, devices: Sequence[str] = (), cores: Sequence[int] = ()
) -> ProcessPlan:
    """Generators take the first devices, the trainer the next or, colocated, the first ones too;
    without CUDA all share the CPU.

    ``devices`` and ``cores`` are those that this process may use, devices by the names that
    ``CUDA_VISIBLE_DEVICES`` takes. With ``config.pin_cores`` each group gets its
    own, as with devices, and the controller stays off the trainer's.
    """
    on_cuda = bool(devices)

    def all_free() -> _Free:
        has_own = config.pin_cores and not on_cuda
        return _Free(devices=list(devices), cores=list(cores) if has_own else [])

    free = all_free()
    replicas = tuple(
        free.group(
            replica_name(index),
            ranks=config.generator.tensor_parallel,
            threads=config.generator.threads,
            seed=_replica_seed(config.seed, index),
        )
        for index in range(config.generator.replicas)
    )
    is_colocated = config.placement == "colocated"
    trainer = (all_free() if is_colocated else free).group(
        "trainer",
        ranks=config.trainer.world_size,
        threads=config.trainer.threads,
        seed=config.seed,
    )
    return ProcessPlan(
        device="cuda" if on_cuda else "cpu",
        replicas=replicas,
        trainer=trainer,
        endpoint=endpoint_group(config.endpoint) if needs_endpoint(config) else None,
        controller_cores=tuple(core for core in cores if core not in trainer.cores)
        if trainer.cores
        else (),
        is_shared=is_colocated,
    )


def plan_serving(
    generator: GeneratorConfig, endpoint: EndpointConfig, *, devices: Sequence[str] = (), seed: int
) -> ServingPlan:
    """Replicas on the first devices; without CUDA all share the CPU."""
    free = _Free(devices=list(devices), cores=[])
    return ServingPlan(
        device="cuda" if devices else "cpu",
        replicas=tuple(
            free.group(
                replica_name(index),
                ranks=generator.tensor_parallel,
                threads=generator.threads,
                seed=_replica_seed(seed, index),
            )
            for index in range(generator.replicas)
        ),
        endpoint=endpoint_group(endpoint),
    )


def needs_endpoint(config: RunConfig) -> bool:
    return config.endpoint.enabled


def endpoint_group(endpoint: EndpointConfig) -> ProcessGroup:
    return ProcessGroup(name="endpoint", ranks=1, threads=endpoint.threads)


@dataclass(slots=True)
class _Free:
    """Devices and cores that no group has yet."""

    devices: list[str]
    cores: list[int]

    def group(self, name: str, *, ranks: int, threads: int, seed: int) -> ProcessGroup:
        return ProcessGroup(
            name=name,
            ranks=ranks,
            threads=threads,
            devices=_take(self.devices, ranks),
            cores=_take(self.cores, ranks * threads),
            seed=seed,
        )


def _replica_seed(seed: int, index: int) -> int:
    """Replicas with equal seeds would share their noise; engines take 32 bits."""
    return (seed * 1000 + index) % 2**32


def _take(free: list[_T], number: int) -> tuple[_T, ...]:
    """The first ``number``, which are free no longer; none where there are none."""
    taken = tuple(free[:number])
    del free[:number]
    return taken


def _describe_groups(groups: Sequence[ProcessGroup]) -> list[str]:
    return [
        f"{group.name}: {group.ranks} process{'es' if group.ranks > 1 else ''} on "
        f"{_describe_place(group.devices, group.cores)}, "
        f"{group.threads} thread{'s' if group.threads > 1 else ''} each"
        for group in groups
    ]


def _summary(replicas: Sequence[ProcessGroup], *others: ProcessGroup) -> str:
    ranks = f" of {replicas[0].ranks} ranks" if replicas[0].ranks > 1 else ""
    devices = tuple(device for group in replicas for device in group.devices)
    cores = tuple(core for group in replicas for core in group.cores)
    what = f"{len(replicas)} replicas" if len(replicas) > 1 else "1 replica"
    parts = [f"{what}{ranks} on {_describe_place(devices, cores)}"]
    for group in others:
        ranks = f" of {group.ranks} ranks" if group.ranks > 1 else ""
        parts.append(f"{group.name}{ranks} on {_describe_place(group.devices, group.cores)}")
    return ", ".join(parts)


def _describe_place(devices: tuple[str, ...], cores: tuple[int, ...]) -> str:
    if devices:
        return f"cuda:{','.join(devices)}"
    return f"cpu cores {','.join(map(str, cores))}" if cores else "cpu"
