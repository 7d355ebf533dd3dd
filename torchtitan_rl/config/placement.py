"""Which host each replica and each trainer rank of a run is on. Decides only; starts nothing.

* The ranks of one replica are on one host.
* The trainer's ranks are together: on one host if one has room for all of them, else on as few as
  possible, each filled before the next.
* Trainer and replicas are on different hosts while there is room: the trainer on the last ones, the
  replicas on the first. On CUDA each rank has a device of its own; in a colocated run, trainer and
  replicas have the same ones.
* A CPU has room for any number of processes (`checks/launch.py` limits their threads), so replicas
  are spread evenly, and so is a trainer over the hosts that are chosen for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchtitan_rl.config.hosts import HostFacts, count, device_of
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
    are_shared = config.placement == "colocated"
    trainer_places = _trainer_places(config, len(hosts), devices)
    for are_apart in (False,) if are_shared else (True, False):
        for trainer_hosts in trainer_places:
            replica_hosts = _replica_hosts(
                config,
                len(hosts),
                devices,
                avoided=trainer_hosts if are_apart else (),
                taken=Counter(() if are_shared else trainer_hosts),
            )
            if replica_hosts is not None:
                return Placement(replica_hosts=replica_hosts, trainer_hosts=trainer_hosts)
    raise NoRoomError(_explain(config, devices or (), has_trainer=bool(trainer_places)))


def _trainer_places(
    config: RunConfig, num_hosts: int, devices: tuple[int, ...] | None
) -> list[tuple[int, ...]]:
    """Where the trainer's ranks could be, the best first."""
    ranks, chosen = config.trainer.world_size, config.launch.trainer_hosts
    if chosen:
        candidates = [chosen]
    else:
        order = list(range(num_hosts))
        if config.placement == "separate":
            order.reverse()
        order.sort(key=lambda host: host in config.launch.generator_hosts)
        candidates = [(host,) for host in order]
        candidates += [tuple(order[:number]) for number in range(2, num_hosts + 1)]
    places = []
    for candidate in candidates:
        if devices is None:
            places.append(_spread(ranks, candidate))
            continue
        rooms = [host for host in candidate for _ in range(devices[host])][:ranks]
        if len(rooms) == ranks:
            places.append(tuple(rooms if chosen else sorted(rooms)))
    return places


def _replica_hosts(
    config: RunConfig,
    num_hosts: int,
    devices: tuple[int, ...] | None,
    *,
    avoided: Collection[int],
    taken: Mapping[int, int],
) -> tuple[int, ...] | None:
    """The host of each replica; None where they do not fit."""
    replicas, ranks = config.generator.replicas, config.generator.tensor_parallel
    allowed = config.launch.generator_hosts or tuple(range(num_hosts))
    hosts = tuple(host for host in allowed if host not in avoided)
    if devices is None:
        return _spread(replicas, hosts) if hosts else None
    rooms = [host for host in hosts for _ in range((devices[host] - taken[host]) // ranks)]
    return tuple(rooms[:replicas]) if len(rooms) >= replicas else None


def _spread(number: int, hosts: tuple[int, ...]) -> tuple[int, ...]:
    """Each host gets as many as the others, or one more; neighbours are together."""
    used = hosts[:number]
    return tuple(used[index * len(used) // number] for index in range(number))


def _explain(config: RunConfig, devices: tuple[int, ...], *, has_trainer: bool) -> str:
    generator, launch, ranks = config.generator, config.launch, config.trainer.world_size
    if not has_trainer:
        need = f"the trainer's {ranks} ranks need a CUDA device each"
        if launch.trainer_hosts:
            there = count(sum(devices[host] for host in launch.trainer_hosts), "device")
            return (
                f"launch.trainer_hosts is {launch.trainer_hosts}: {need}, and these hosts have "
                f"{there}; give more of them, or fewer ranks"
            )
        name = max(_TRAINER_RANKS, key=lambda name: getattr(config.trainer, name))
        return (
            f"trainer.{name} is {getattr(config.trainer, name)}: {need}, and all hosts have "
            f"{count(sum(devices), 'device')}; give fewer, or more hosts"
        )
    parallel = generator.tensor_parallel
    if parallel > max(devices):
        return (
            f"generator.tensor_parallel is {parallel}: the ranks of a replica are on one host, and "
            f"no host has more than {count(max(devices), 'CUDA device')}; give at most that"
        )
    need = f"{count(generator.replicas, 'replica')} of {count(parallel, 'CUDA device')}"
    if launch.generator_hosts:
        return (
            f"launch.generator_hosts is {launch.generator_hosts}: these hosts have no room for "
            f"{need}; give more of them, or fewer generator.replicas"
        )
    besides = "" if config.placement == "colocated" else f" and {count(ranks, 'trainer rank')}"
    return (
        f"generator.replicas is {generator.replicas}: the hosts, with "
        f"{'+'.join(map(str, devices))} CUDA devices, have no room for {need}{besides}; give "
        "fewer, or more hosts"
    )
