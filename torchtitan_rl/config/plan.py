"""Plans the processes of a run before any of them starts: where each runs, and with which devices,
cores and threads. On several hosts, `machine.place` chooses the host of each process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from torchtitan_rl.config.machine import (
    CONTROLLER_HOST,
    HostFacts,
    Placement,
    count,
    device_of,
    host_name,
    place,
)
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.generation.config import GeneratorConfig, shown_options
from torchtitan_rl.serving.config import EndpointConfig

_T = TypeVar("_T")

# Without these settings glibc asks the kernel for new memory at each allocation of more than 32 MB,
# whatever its mmap threshold is. With large microbatches this takes a seventh of a step's time.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """Processes that start and step together: the ranks of one replica, or of the trainer. ``host``
    is an index into the plan's hosts. The trainer's ranks may be on several hosts, see
    `on_each_host`."""

    name: str
    ranks: int
    threads: int  # OMP threads of each rank
    host: int = 0  # the first rank's host
    rank_hosts: tuple[int, ...] = ()  # each rank's host, if the ranks are on several hosts
    first_rank: int = 0  # in a part of a group: the part's first rank
    world: int = 0  # in a part of a group: the number of ranks of the whole group
    devices: tuple[str, ...] = ()  # names of CUDA devices, one for each rank; empty on the CPU
    cores: tuple[int, ...] = ()  # CPU cores on which no other group computes; empty: any core
    seed: int = 0
    yields_cores: bool = False
    """The group's OMP threads sleep while they wait for each other, so that other processes can
    compute."""
    keeps_memory: bool = False
    """The group's processes keep freed memory until they end, see `KEEPS_MEMORY`."""

    @property
    def place(self) -> str:
        """Describe the devices: ``cuda:0,1``, ``cpu cores 2,3`` or ``cpu``."""
        return _describe_place(self.devices, self.cores)

    def on_each_host(self) -> tuple[ProcessGroup, ...]:
        """The group's parts, one for each host, in the order of their ranks."""
        if not self.rank_hosts:
            return (self,)
        parts = []
        for host in dict.fromkeys(self.rank_hosts):
            ranks = [rank for rank, one in enumerate(self.rank_hosts) if one == host]
            part = slice(ranks[0], ranks[-1] + 1)
            parts.append(
                replace(
                    self,
                    ranks=len(ranks),
                    host=host,
                    rank_hosts=(),
                    first_rank=ranks[0],
                    world=self.ranks,
                    devices=self.devices[part],
                )
            )
        return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """All processes except the controller, which makes the plan. ``serve`` has no trainer. Without
    ``hosts`` all processes are on this machine, which is host 0. ``teachers`` are the replicas of
    the teachers' checkpoints, `TeacherConfig.replicas` of each."""

    device: Literal["cpu", "cuda"]
    hosts: tuple[HostFacts, ...] = ()
    replicas: tuple[ProcessGroup, ...]
    trainer: ProcessGroup | None = None
    teachers: tuple[ProcessGroup, ...] = ()
    endpoint: ProcessGroup | None = None
    controller_cores: tuple[int, ...] = ()  # empty: any core
    is_shared: bool = False  # trainer and replicas have the same devices, and alternate
    shares_cores: bool = False
    """On some CPU, trainer and replicas together have more threads than there are cores."""
    vllm_options: tuple[str, ...] = ()  # those of the user, for each replica

    @property
    def num_devices(self) -> int:
        """The number of CUDA devices of trainer, replicas and teachers; without CUDA, of their
        hosts."""
        trainer = [] if self.trainer is None else [self.trainer]
        groups = (*self.replicas, *self.teachers, *trainer)
        parts = [part for group in groups for part in group.on_each_host()]
        if self.device == "cpu":
            return len({part.host for part in parts})
        return len({(part.host, device) for part in parts for device in part.devices})

    def summary(self) -> str:
        """Describe the plan in one line: ``2 replicas on cuda:0,1, trainer on cuda:2``."""
        if self.hosts:
            return "; ".join(
                f"{host_name(index)}: {', '.join(names)}"
                for index in range(len(self.hosts))
                if (names := self._names_on(index))
            )
        replicas = _as_one(self.replicas, "replica")
        teachers = _as_one(self.teachers, "teacher replica")
        others = [group for group in (self.trainer, self.endpoint) if group is not None]
        return ", ".join(
            f"{group.name}{f' of {group.ranks} ranks' if group.ranks > 1 else ''} on {group.place}"
            for group in (*replicas, *teachers, *others)
        )

    def describe(self) -> str:
        """Describe the plan in several lines."""
        place = _describe_place((), self.controller_cores)
        lines = [f"device: {self.device}", f"controller: 1 process on {place}"]
        if self.hosts:
            lines += [_describe(group) for group in self._on(CONTROLLER_HOST)]
            for index, host in enumerate(self.hosts):
                lines.append(f"{host_name(index)}: {host.describe()}")
                lines += [f"  {_describe(group)}" for group in self._on(index)] or ["  not used"]
        else:
            lines += [_describe(group) for group in (*self.replicas, *self._others())]
        if self.is_shared:
            lines.append("placement: colocated, the trainer computes while the replicas sleep")
        if self.vllm_options:
            lines.append(f"vLLM: {', '.join(self.vllm_options)}")
        return "\n".join(lines)

    def _others(self) -> list[ProcessGroup]:
        some = [group for group in (self.trainer, self.endpoint) if group is not None]
        return [*self.teachers, *some]

    def _names_on(self, host: int) -> list[str]:
        """Describe the groups on a host: ``["2 replicas", "trainer"]``."""
        replicas = sum(group.host == host for group in self.replicas)
        names = [count(replicas, "replica")] if replicas else []
        ranks = sum(part.ranks for part in self._on(host) if part.name == "trainer")
        if self.trainer is not None and ranks:
            is_whole = ranks == self.trainer.ranks
            names.append("trainer" if is_whole else count(ranks, "trainer rank"))
        return names

    def _on(self, host: int) -> list[ProcessGroup]:
        """The groups on one host. Of a group on several hosts, its part on this host."""
        groups = (*self.replicas, *self._others())
        return [part for group in groups for part in group.on_each_host() if part.host == host]


def _as_one(groups: Sequence[ProcessGroup], noun: str) -> list[ProcessGroup]:
    """Describe all replicas of a kind as one group; empty without replicas."""
    return [
        replace(
            group,
            name=count(len(groups), noun),
            devices=tuple(device for group in groups for device in group.devices),
            cores=tuple(core for group in groups for core in group.cores),
        )
        for group in groups[:1]
    ]


def replica_name(index: int) -> str:
    return f"replica{index}"


def plan_processes(
    config: RunConfig, *, devices: Sequence[str] = (), cores: Sequence[int] = ()
) -> ProcessPlan:
    """Plan all processes on this machine. Replicas get the first devices, and the trainer gets the
    next devices (in a colocated run, the first ones, too). Without CUDA all processes share the
    CPU.

    ``devices`` and ``cores`` are those that this process may use; devices are named as in
    ``CUDA_VISIBLE_DEVICES``. With ``config.pin_cores`` each group gets its own cores, and the
    controller does not use the trainer's cores.
    """
    here = HostFacts(cuda_devices=tuple(devices), num_cores=len(cores), memory_bytes=0)
    placement = Placement(
        replica_hosts=(0,) * config.generator.num_local,
        trainer_hosts=(0,) * config.trainer.world_size,
    )
    plan = _plan(config, [here], placement, cores if config.pin_cores and not devices else ())
    taken = () if plan.trainer is None else plan.trainer.cores
    others = tuple(core for core in cores if core not in taken)
    return replace(plan, hosts=(), controller_cores=others if taken else ())


def plan_on_hosts(config: RunConfig, hosts: Sequence[HostFacts]) -> ProcessPlan:
    """The controller's machine need not be one of the hosts. Raises NoRoomError."""
    return _plan(config, hosts, place(config, hosts))


def plan_serving(
    generator: GeneratorConfig,
    endpoint: EndpointConfig | None,
    *,
    devices: Sequence[str] = (),
    seed: int,
) -> ProcessPlan:
    """Plan replicas on the first devices, and an endpoint if one is given. Without CUDA all
    processes share the CPU."""
    free = list(devices)
    return ProcessPlan(
        device="cuda" if devices else "cpu",
        replicas=tuple(
            plan_replica(generator, seed, index, free, []) for index in range(generator.replicas)
        ),
        endpoint=None if endpoint is None else _endpoint(endpoint),
        vllm_options=_vllm_options(generator),
    )


def threads_on_hosts(config: RunConfig, placement: Placement) -> tuple[Counter[int], Counter[int]]:
    """The numbers of threads that compute on the CPU of each host: the first counter is for
    generation, the second for training."""
    generator, trainer = config.generator, config.trainer
    generating, training = Counter[int](), Counter[int]()
    for host in placement.replica_hosts:
        generating[host] += generator.tensor_parallel * generator.threads
    for host in placement.trainer_hosts:
        training[host] += trainer.threads
    if config.teacher_ranks:
        generating[0] += config.teacher_ranks * generator.threads
    return generating, training


def _plan(
    config: RunConfig,
    hosts: Sequence[HostFacts],
    placement: Placement,
    cores: Sequence[int] = (),
) -> ProcessPlan:
    """Assign the devices of the hosts, and ``cores``, to the groups. If ``cores`` is empty, the
    groups share all cores."""
    devices, free_cores = _free_devices(hosts), list(cores)
    replicas = [
        plan_replica(config.generator, config.seed, index, devices[host], free_cores, host=host)
        for index, host in enumerate(placement.replica_hosts)
        if config.mode != "train"
    ]
    if config.is_colocated:
        devices, free_cores = _free_devices(hosts), list(cores)
    device, rank_hosts = device_of(hosts), placement.trainer_hosts
    generating, training = threads_on_hosts(config, placement)
    crowded, shared = set[int](), set[int]()
    if device == "cpu":
        are_alternating = config.schedule.staleness == 0 or config.is_colocated
        at_once = generating | training if are_alternating else generating + training
        crowded = _crowded_hosts(at_once, hosts)
        shared = _crowded_hosts(generating + training, hosts) & {*generating} & {*training}
    has_endpoint = config.endpoint.enabled and config.mode != "train"
    trainer = ProcessGroup(
        name="trainer",
        ranks=config.trainer.world_size,
        threads=config.trainer.threads,
        host=rank_hosts[0],
        rank_hosts=rank_hosts if len(set(rank_hosts)) > 1 else (),
        devices=tuple(one for host in rank_hosts for one in _take(devices[host], 1)),
        cores=_take(free_cores, config.trainer.num_threads),
        seed=config.seed,
        yields_cores=not crowded.isdisjoint(rank_hosts),
        keeps_memory=device == "cpu",
    )
    return ProcessPlan(
        device=device,
        hosts=tuple(hosts),
        replicas=tuple(replace(one, yields_cores=one.host in crowded) for one in replicas),
        trainer=None if config.mode == "generate" else trainer,
        teachers=_teachers(config, hosts[0], [*replicas, trainer], free_cores),
        endpoint=_endpoint(config.endpoint) if has_endpoint else None,
        is_shared=config.is_colocated and config.mode == "both",
        shares_cores=bool(shared),
        vllm_options=_vllm_options(config.generator),
    )


def plan_replica(
    generator: GeneratorConfig,
    seed: int,
    index: int,
    devices: list[str],
    cores: list[int],
    *,
    host: int = 0,
) -> ProcessGroup:
    """Plan one replica. Its devices and cores are removed from ``devices`` and ``cores``, the free
    ones of its host."""
    ranks = generator.tensor_parallel
    return ProcessGroup(
        name=replica_name(index),
        ranks=ranks,
        threads=generator.threads,
        host=host,
        devices=_take(devices, ranks),
        cores=_take(cores, ranks * generator.threads),
        # Replicas with equal seeds would sample with the same random numbers. An engine's seed has
        # 32 bits.
        seed=(seed * 1000 + index) % 2**32,
    )


def _teachers(
    config: RunConfig, host: HostFacts, others: Sequence[ProcessGroup], cores: list[int]
) -> tuple[ProcessGroup, ...]:
    """Plan the teachers' replicas, on devices of the controller's machine that no other group
    has."""
    if config.mode == "train":
        return ()
    used = {device for group in others for device in group.devices}
    free = [device for device in host.cuda_devices if device not in used]
    engine = config.teacher.generator(config.generator, config.rollout.max_total_tokens)
    return tuple(
        replace(plan_replica(engine, config.seed, index, free, cores), name=f"teacher{index}")
        for index in range(config.teacher.num_replicas)
    )


def _vllm_options(generator: GeneratorConfig) -> tuple[str, ...]:
    own = ("VLLM_BATCH_INVARIANT=1",) if generator.batch_invariant else ()
    return (*shown_options(generator.vllm), *own)


def _endpoint(endpoint: EndpointConfig) -> ProcessGroup:
    return ProcessGroup(name="endpoint", ranks=1, threads=endpoint.threads, host=CONTROLLER_HOST)


def _free_devices(hosts: Sequence[HostFacts]) -> list[list[str]]:
    return [list(host.cuda_devices) for host in hosts]


def _take(free: list[_T], number: int) -> tuple[_T, ...]:
    taken = tuple(free[:number])
    del free[:number]
    return taken


def _crowded_hosts(threads: Counter[int], hosts: Sequence[HostFacts]) -> set[int]:
    return {host for host, number in threads.items() if number > hosts[host].num_cores}


def _describe(group: ProcessGroup) -> str:
    last = group.first_rank + group.ranks - 1
    ranks = f"rank {last}" if group.ranks == 1 else f"ranks {group.first_rank} to {last}"
    processes = "1 process" if group.ranks == 1 else f"{group.ranks} processes"
    return (
        f"{group.name}{f' {ranks}' if group.world else ''}: {processes} on {group.place}, "
        f"{count(group.threads, 'thread')} each"
    )


def _describe_place(devices: tuple[str, ...], cores: tuple[int, ...]) -> str:
    if devices:
        return f"cuda:{','.join(devices)}"
    return f"cpu cores {','.join(map(str, cores))}" if cores else "cpu"
