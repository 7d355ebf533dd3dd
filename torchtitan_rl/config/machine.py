"""Facts about the machines of a run, and `place`, which chooses the host of each replica and each
trainer rank. Starts no process.

In each process CUDA numbers the devices of ``CUDA_VISIBLE_DEVICES`` (the process's *mask*) from 0.
So a child process gets one of its parent's devices only if the child's mask has the device's own
name: the entry of the parent's mask, or the plain index if the parent has no mask.

`place` follows these rules:

* The ranks of one replica are on one host, and so are the ranks of one tensor-parallel group of the
  trainer.
* The trainer's ranks are together: on one host if it has room for all of them, otherwise on as few
  hosts as possible, each of which is filled before the next.
* Trainer and replicas are on different hosts if there is room: the trainer on the last hosts,
  the replicas on the first hosts. If the configuration chooses hosts for the replicas, the replicas
  are spread evenly over the chosen hosts. On CUDA each rank has its own device.
* In a colocated run trainer and replicas share devices. The trainer is placed first on hosts that
  are chosen for the replicas. The replicas are placed first on the trainer's hosts.
* With ``mode`` ``generate`` or ``train`` there is only one of the two, which may take every device.
* A CPU has room for any number of processes (`room.py` limits their threads), so replicas are
  spread evenly. If the configuration chooses hosts for the trainer, its ranks are spread evenly
  over the chosen hosts.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.config.preflight import CudaFacts, probe_cuda
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import ConfigError

CONTROLLER_HOST = -1  # a value of `ProcessGroup.host`: the controller's machine
VARIABLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"

_MADE_UP = re.compile(
    r"(?P<hosts>[1-9]\d{0,3})x(?P<devices>\d{1,3})(x(?P<size>[1-9]\d{0,3})GB)?"
    r"|(?P<own>[1-9]\d{0,2})x(?P<own_size>[1-9]\d{0,3})GB"
)
_MOST_MADE_UP = 4096  # devices; a plan of millions takes minutes
_MADE_UP_CORES = 64
_MADE_UP_MEMORY = 1 << 40
_INDEX = re.compile(
    r"[ \t\n\v\f\r]*\+?(?P<digits>\d+)"
)  # a number as C reads it: other characters may follow
# Files with a limit, or with a quota and its period, for cgroups version 2 and 1.
_CGROUP_CORES = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_CGROUP_BYTES = (
    ("/sys/fs/cgroup/memory.max",),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The resources of one host, or of this machine alone. ``cuda_devices`` are named as in its own
    ``CUDA_VISIBLE_DEVICES``."""

    address: str = ""  # its worker's address, or ``local``; empty if it is made up, or of a job
    mesh: str = ""  # the name of its mesh in ``launch.job``
    machine: str = ""  # the host's own name
    cuda_devices: tuple[str, ...] = ()
    device_bytes: int = 0  # memory of the smallest CUDA device; 0: unknown
    num_cores: int
    memory_bytes: int
    max_open_files: int | None = None  # limit of one process; None: no limit
    cuda: CudaFacts | None = None  # None without devices, and if the host is made up

    def describe(self) -> str:
        """Such as ``tls://10.0.0.2:26600 (node7), 8 CUDA devices``; without devices, its cores."""
        devices = len(self.cuda_devices)
        has = count(devices, "CUDA device") if devices else count(self.num_cores, "core")
        has += f" of {self.device_bytes / 2**30:.1f} GiB" if self.device_bytes else ""
        where = self.address or self.mesh
        where = f"{where} ({self.machine})" if self.machine else where
        return ", ".join(part for part in (where, has) if part)


def memory_bytes() -> int:
    """The memory of this machine that this process may use."""
    import psutil

    return min([psutil.virtual_memory().total, *_cgroup_limits(_CGROUP_BYTES)])


def machine_facts() -> HostFacts:
    """The resources of this machine that this process may use."""
    import torch

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    devices = visible_devices(os.environ.get(VARIABLE), num_visible=torch.cuda.device_count())
    cuda = probe_cuda() if devices else None
    return HostFacts(
        cuda_devices=devices,
        device_bytes=min((one.total_bytes for one in cuda.devices), default=0) if cuda else 0,
        num_cores=min([len(os.sched_getaffinity(0)), *_cgroup_limits(_CGROUP_CORES)]),
        memory_bytes=memory_bytes(),
        max_open_files=None if soft == resource.RLIM_INFINITY else soft,
        cuda=cuda,
    )


def made_up_hosts(text: str, addresses: Sequence[str] = ()) -> tuple[HostFacts, ...]:
    """The hosts of ``launch.hosts``: ``4x8`` is 4 hosts of 8 CUDA devices, ``4x8x80GB`` says their
    size, and ``8x80GB`` is one host.

    Raises:
        ValueError: the text has another form, or there are too many devices.
    """
    found = _MADE_UP.fullmatch(text)
    if found is None:
        raise ValueError(
            "give NUMBERxDEVICES, such as 4x8, or 4x0 for hosts without CUDA devices; with the "
            "devices' size, 8x80GB for one host or 4x8x80GB"
        )
    number, devices = int(found["hosts"] or 1), int(found["devices"] or found["own"])
    if number * devices > _MOST_MADE_UP:
        raise ValueError(f"give at most {_MOST_MADE_UP} devices")
    size = int(found["size"] or found["own_size"] or 0) * 10**9
    return tuple(
        HostFacts(
            address=addresses[index] if index < len(addresses) else "",
            cuda_devices=tuple(map(str, range(devices))),
            device_bytes=size if devices else 0,
            num_cores=_MADE_UP_CORES,
            memory_bytes=_MADE_UP_MEMORY,
        )
        for index in range(number)
    )


def hosts_by_mesh(config: RunConfig, hosts: Sequence[HostFacts]) -> RunConfig:
    """Choose the hosts of trainer and replicas by the names of the job's meshes, if it has several.
    Raises ConfigError if these do not fit the run."""
    meshes = dict.fromkeys(host.mesh for host in hosts)
    if len(meshes) < 2:
        return config
    field = f"launch.job is {config.launch.job!r}: its meshes are {', '.join(meshes)}"
    if config.is_colocated:
        raise ConfigError(f"{field}, and with placement colocated trainer and replicas share one")
    trainer, generator = (
        tuple(index for index, host in enumerate(hosts) if host.mesh.startswith(part))
        for part in ("trainer", "generator")
    )
    if not trainer or not generator or len(trainer) + len(generator) < len(hosts):
        raise ConfigError(
            f"{field}; let each name begin with trainer or generator, with one of each, or give "
            "one mesh for both"
        )
    launch = replace(config.launch, trainer_hosts=trainer, generator_hosts=generator)
    return replace(config, launch=launch)


def device_of(hosts: Iterable[HostFacts]) -> Literal["cpu", "cuda"]:
    """The device type of a run: CUDA if any host has it. Hosts without CUDA are then not used."""
    return "cuda" if any(host.cuda_devices for host in hosts) else "cpu"


def host_name(index: int) -> str:
    """The name of a host in the plan, in logs and in errors."""
    return "controller" if index == CONTROLLER_HOST else f"host{index}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def visible_devices(mask: str | None, *, num_visible: int) -> tuple[str, ...]:
    """The names of the devices that a process with this mask sees, in the order of the mask.

    Args:
        mask: the value of ``CUDA_VISIBLE_DEVICES``; None if it is not set.
        num_visible: the number of devices that CUDA reports to that process. This number shows
            which of the mask's indices or UUIDs exist. (CUDA reports at most one MIG instance to a
            process, but each child may get another one.)

    >>> visible_devices(None, num_visible=2)
    ('0', '1')
    >>> visible_devices("4,5", num_visible=2)
    ('4', '5')
    >>> visible_devices("4,-1,5", num_visible=1)
    ('4',)
    """
    if mask is None:
        return tuple(str(index) for index in range(num_visible))
    names = named_devices(mask)
    if num_visible and names and names[0].startswith(MIG):
        return names
    return names[:num_visible]


def named_devices(mask: str) -> tuple[str, ...]:
    """The entries of a mask before the first entry that is not a device name, as CUDA parses it.

    An index may be followed by other characters, which CUDA ignores. The first entry decides
    whether all entries are indices, ``GPU-`` UUIDs (or prefixes of UUIDs) or ``MIG-`` names; an
    entry of another kind ends the list. If a device is named twice, the whole mask is invalid, and
    no device is visible.
    """
    kind: str | None = None
    names: list[str] = []
    for entry in mask.split(","):
        found, name = _read_entry(entry)
        if found is None or (kind is not None and found != kind):
            break
        kind = found
        if name in names:
            return ()
        names.append(name)
    return tuple(names)


def _read_entry(entry: str) -> tuple[str | None, str]:
    """The kind of an entry (None if it is not a device name), and the name to pass on."""
    text = entry.strip()
    for prefix in ("GPU-", MIG):
        if text.startswith(prefix):
            return prefix, text
    index = _INDEX.match(entry)
    return ("index", str(int(index["digits"]))) if index else (None, "")


def _cgroup_limits(files: Sequence[Sequence[str]]) -> list[int]:
    """The cgroup limits of this process, one for each version of cgroups; empty without a limit."""
    limits: list[int] = []
    for paths in files:
        with suppress(OSError, ValueError):  # another version of cgroups, or "max"
            quota, *period = (int(n) for path in paths for n in Path(path).read_text().split())
            limits += [math.ceil(quota / math.prod(period))] if quota > 0 else []
    return limits


TRAINER_RANKS = (
    *("data_parallel_replicate", "data_parallel_shard"),
    *("context_parallel", "tensor_parallel"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The index of the host of each replica, and of each trainer rank."""

    replica_hosts: tuple[int, ...]
    trainer_hosts: tuple[int, ...]


class NoRoomError(ValueError):
    """The hosts have no room for the run. The message names the field to change, and ``proposal``
    may continue it with options that share devices."""

    def __init__(self, message: str, proposal: str = "") -> None:
        super().__init__(message + proposal)
        self.message = message


def place(config: RunConfig, hosts: Sequence[HostFacts]) -> Placement:
    """See the module for the rules. Raises NoRoomError if trainer and replicas do not fit on the
    hosts, or not on those that the configuration chooses for them."""
    if config.mode == "generate":  # the rank that remains takes no device from the replicas
        one_rank: dict[str, Any] = dict.fromkeys(TRAINER_RANKS, 1)
        config = replace(config, trainer=replace(config.trainer, **one_rank))
    elif config.mode == "train":
        generator = replace(config.generator, replicas=1, tensor_parallel=1)
        config = replace(config, generator=generator)
    devices = None
    if device_of(hosts) == "cuda":
        devices = tuple(len(host.cuda_devices) for host in hosts)
        devices = (max(0, devices[0] - config.teacher_ranks), *devices[1:])
    trainer_places = _trainer_places(config, len(hosts), devices)
    for are_apart in (False,) if _share_devices(config) else (True, False):
        for trainer_hosts in trainer_places:
            replica_hosts = _replica_hosts(
                config, len(hosts), devices, trainer_hosts, are_apart=are_apart
            )
            if replica_hosts is not None:
                return Placement(replica_hosts=replica_hosts, trainer_hosts=trainer_hosts)
    raise NoRoomError(
        _explain(config, devices or (), trainer_places),
        sharing_proposal(config, devices[0]) if devices and len(devices) == 1 else "",
    )


def _share_devices(config: RunConfig) -> bool:
    return config.is_colocated or config.mode != "both"


def _trainer_places(
    config: RunConfig, num_hosts: int, devices: tuple[int, ...] | None
) -> list[tuple[int, ...]]:
    """All possible placements of the trainer's ranks, best first; each has the host of each
    rank."""
    ranks, together = config.trainer.world_size, config.trainer.tensor_parallel
    chosen = config.launch.trainer_hosts
    if chosen:
        candidates = [chosen]
    else:
        order = list(range(num_hosts))
        is_separate = not _share_devices(config)
        if is_separate:
            order.reverse()
        order.sort(key=lambda host: (host in config.launch.generator_hosts) == is_separate)
        candidates = [(host,) for host in order]
        candidates += [tuple(order[:number]) for number in range(2, num_hosts + 1)]
    places = []
    for candidate in candidates:
        if devices is None:
            groups = _spread(ranks // together, dict.fromkeys(candidate, ranks))
        else:
            rooms = [host for host in candidate for _ in range(devices[host] // together)]
            groups = tuple(rooms[: ranks // together])
        place = tuple(host for host in groups for _ in range(together))
        if len(place) == ranks:
            places.append(place if chosen else tuple(sorted(place)))
    return places


def _replica_hosts(
    config: RunConfig,
    num_hosts: int,
    devices: tuple[int, ...] | None,
    trainer_hosts: tuple[int, ...],
    *,
    are_apart: bool,
) -> tuple[int, ...] | None:
    """The host of each replica; None if the replicas do not fit."""
    replicas, ranks = config.generator.replicas, config.generator.tensor_parallel
    launch, are_shared = config.launch, _share_devices(config)
    allowed = launch.generator_hosts or tuple(range(num_hosts))
    if are_shared:
        if devices is None and not launch.generator_hosts:
            allowed = launch.trainer_hosts or allowed
        allowed = tuple(sorted(allowed, key=lambda host: host not in trainer_hosts))
    hosts = [host for host in allowed if not are_apart or host not in trainer_hosts]
    if devices is None:
        rooms = dict.fromkeys(hosts, replicas)
    else:
        taken = Counter(() if are_shared else trainer_hosts)
        rooms = {host: (devices[host] - taken[host]) // ranks for host in hosts}
    if sum(rooms.values()) < replicas:
        return None
    if devices is None or (launch.generator_hosts and not are_shared):
        return _spread(replicas, rooms)
    return tuple(host for host in hosts for _ in range(rooms[host]))[:replicas]


def _spread(number: int, rooms: Mapping[int, int]) -> tuple[int, ...]:
    """Spread ``number`` replicas, or groups of ranks, over hosts: one on each host, then a second
    one on each host with room, and so on. Returns the host of each, in the order of the hosts.
    ``rooms`` is the number that each host can take.

    >>> _spread(4, {0: 4, 1: 1})
    (0, 0, 0, 1)
    """
    turns = [(turn, host) for host, room in rooms.items() for turn in range(room)]
    turns.sort(key=lambda one: one[0])
    used = Counter(host for _, host in turns[:number])
    return tuple(host for host in rooms for _ in range(used[host]))


def _explain(config: RunConfig, devices: tuple[int, ...], places: Sequence[tuple[int, ...]]) -> str:
    generator, launch, ranks = config.generator, config.launch, config.trainer.world_size
    if not places:
        return _explain_trainer(config, devices)
    parallel = generator.tensor_parallel
    if parallel > max(devices):
        return (
            f"generator.tensor_parallel is {parallel}: the ranks of a replica are on one host, and "
            f"no host has more than {count(max(devices), 'CUDA device')}; give at most that"
        )
    need = f"{count(generator.replicas, 'replica')} of {count(parallel, 'CUDA device')}"
    is_separate = config.placement == "separate"
    if launch.generator_hosts:
        held = min(sum(host in launch.generator_hosts for host in place) for place in places)
        trainer = f" and {count(held, 'trainer rank')}" if is_separate and held else ""
        return (
            f"launch.generator_hosts is {launch.generator_hosts}: these hosts have no room for "
            f"{need}{trainer}; give more of them, or fewer generator.replicas"
        )
    trainer = f" and {count(ranks, 'trainer rank')}" if is_separate else ""
    return (
        f"generator.replicas is {generator.replicas}: {_have(devices)} no room for "
        f"{need}{trainer}; give fewer, or more hosts"
    )


def _explain_trainer(config: RunConfig, devices: tuple[int, ...]) -> str:
    trainer, chosen = config.trainer, config.launch.trainer_hosts
    if trainer.tensor_parallel > max(devices):
        return (
            f"trainer.tensor_parallel is {trainer.tensor_parallel}: the ranks of a tensor-parallel "
            f"group are on one host, and no host has more than "
            f"{count(max(devices), 'CUDA device')}; give at most that, and more "
            "trainer.data_parallel_shard"
        )
    need = f"the trainer's {count(trainer.world_size, 'rank')}"
    if trainer.tensor_parallel > 1:
        need += f", of which {trainer.tensor_parallel} must be on one host"
    if chosen:
        has = _have(tuple(devices[host] for host in chosen))
        return (
            f"launch.trainer_hosts is {chosen}: {has} no room for {need}; give more of them, or "
            "fewer ranks"
        )
    name = max(TRAINER_RANKS, key=lambda name: getattr(trainer, name))
    return (
        f"trainer.{name} is {getattr(trainer, name)}: {_have(devices)} no room for {need}; "
        "give fewer, or more hosts"
    )


def sharing_proposal(config: RunConfig, num_devices: int) -> str:
    """The options with which trainer and replicas share the devices of a host that has too few of
    them; empty if that is not possible."""
    generator, trainer = config.generator, config.trainer
    if (
        config.mode != "both"
        or generator.tensor_parallel > num_devices
        or trainer.token_parts > num_devices
    ):
        return ""
    options = [] if config.is_colocated else ["--placement colocated"]
    if generator.num_ranks > num_devices:
        options.append(f"--generator.replicas {num_devices // generator.tensor_parallel}")
    if trainer.world_size > num_devices:
        shard = num_devices // trainer.token_parts
        options.append(f"--trainer.data-parallel-shard {shard}")
        if trainer.data_parallel_replicate > 1:
            options.append("--trainer.data-parallel-replicate 1")
    return f", or let trainer and replicas share: {' '.join(options)}"


def _have(devices: tuple[int, ...]) -> str:
    if len(devices) == 1:
        return f"the host, with {count(devices[0], 'CUDA device')}, has"
    return f"the hosts, with {'+'.join(map(str, devices))} CUDA devices, have"
