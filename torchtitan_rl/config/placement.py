"""Which host each replica and each trainer rank of a run is on. Decides only; starts nothing.

* The ranks of one replica are on one host, and so are those of one tensor-parallel group of the
  trainer.
* The trainer's ranks are together: on one host if one has room for all of them, else on as few as
  possible, each filled before the next.
* Trainer and replicas are on different hosts while there is room: the trainer on the last ones, the
  replicas on the first, or spread evenly over those that are chosen for them. On CUDA each rank has
  a device of its own.
* In a colocated run trainer and replicas have the same devices: each fills the hosts of the other
  first.
* A CPU has room for any number of processes (`room.py` limits their threads), so replicas
  are spread evenly, and so is a trainer over the hosts that are chosen for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_rl.config.machine import HostFacts, count, device_of
from torchtitan_rl.config.run import RunConfig

_TRAINER_RANKS = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Indices of hosts: of each replica, and of each trainer rank."""

    replica_hosts: tuple[int, ...]
    trainer_hosts: tuple[int, ...]


class NoRoomError(ValueError):
    """The hosts have no room. The message names the field to change."""


def place(config: RunConfig, hosts: Sequence[HostFacts]) -> Placement:
    """
    Raises:
        NoRoomError: trainer and replicas do not fit, or not on the hosts that are chosen for them.
    """
    devices = None
    if device_of(hosts) == "cuda":
        devices = tuple(len(host.cuda_devices) for host in hosts)
    trainer_places = _trainer_places(config, len(hosts), devices)
    for are_apart in (False,) if config.placement == "colocated" else (True, False):
        for trainer_hosts in trainer_places:
            replica_hosts = _replica_hosts(
                config, len(hosts), devices, trainer_hosts, are_apart=are_apart
            )
            if replica_hosts is not None:
                return Placement(replica_hosts=replica_hosts, trainer_hosts=trainer_hosts)
    raise NoRoomError(_explain(config, devices or (), trainer_places))


def _trainer_places(
    config: RunConfig, num_hosts: int, devices: tuple[int, ...] | None
) -> list[tuple[int, ...]]:
    """Where the trainer's ranks could be, the best first."""
    ranks, together = config.trainer.world_size, config.trainer.tensor_parallel
    chosen = config.launch.trainer_hosts
    if chosen:
        candidates = [chosen]
    else:
        order = list(range(num_hosts))
        is_separate = config.placement == "separate"
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
    """The host of each replica; None where they do not fit."""
    replicas, ranks = config.generator.replicas, config.generator.tensor_parallel
    launch, are_shared = config.launch, config.placement == "colocated"
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
    """The hosts of ``number`` replicas, or groups of ranks: one on each host, then a second one
    where there is room, and so on; those of one host are together. ``rooms`` says how many each
    host takes.

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
    name = max(_TRAINER_RANKS, key=lambda name: getattr(trainer, name))
    return (
        f"trainer.{name} is {getattr(trainer, name)}: {_have(devices)} no room for {need}; "
        "give fewer, or more hosts"
    )


def _have(devices: tuple[int, ...]) -> str:
    if len(devices) == 1:
        return f"the host, with {count(devices[0], 'CUDA device')}, has"
    return f"the hosts, with {'+'.join(map(str, devices))} CUDA devices, have"
