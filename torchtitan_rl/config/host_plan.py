"""The plan of a run on several hosts, made of what they have: see `placement` for who is where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torchtitan_rl.config.hosts import HostFacts, device_of
from torchtitan_rl.config.placement import Placement, place
from torchtitan_rl.config.plan import Free, ProcessGroup, ProcessPlan, endpoint_group, take
from torchtitan_rl.config.run import RunConfig


def plan_on_hosts(config: RunConfig, hosts: Sequence[HostFacts]) -> ProcessPlan:
    """As `plan_processes`, on hosts of which the controller's machine need not be one.

    Raises:
        NoRoomError: they have no room for trainer and replicas.
    """
    placement = place(config, hosts)
    free = [Free(devices=list(host.cuda_devices), cores=[]) for host in hosts]
    is_colocated = config.placement == "colocated"
    replicas = tuple(
        free[host].replica(config.generator, config.seed, index, host=host)
        for index, host in enumerate(placement.replica_hosts)
    )
    if is_colocated:
        free = [Free(devices=list(host.cuda_devices), cores=[]) for host in hosts]
    rank_hosts = placement.trainer_hosts
    is_cuda = device_of(hosts) == "cuda"
    trainer = ProcessGroup(
        name="trainer",
        ranks=config.trainer.world_size,
        threads=config.trainer.threads,
        host=rank_hosts[0],
        rank_hosts=rank_hosts if len(set(rank_hosts)) > 1 else (),
        devices=tuple(device for host in rank_hosts for device in take(free[host].devices, 1)),
        seed=config.seed,
        keeps_memory=not is_cuda,
    )
    generating, training = threads_on_hosts(config, placement)
    crowded: set[int] = set()
    if not is_cuda:
        # Synchronous phases alternate.
        are_alternating = config.schedule.staleness == 0 or is_colocated
        at_once = generating | training if are_alternating else generating + training
        crowded = _crowded_hosts(at_once, hosts)
    shared = _crowded_hosts(generating + training, hosts) & generating.keys() & training.keys()
    return ProcessPlan(
        device=device_of(hosts),
        hosts=tuple(hosts),
        replicas=tuple(replace(one, yields_cores=one.host in crowded) for one in replicas),
        trainer=replace(trainer, yields_cores=not crowded.isdisjoint(rank_hosts)),
        endpoint=endpoint_group(config.endpoint) if config.endpoint.enabled else None,
        is_shared=is_colocated,
        shares_cores=not is_cuda and bool(shared),
    )


def threads_on_hosts(config: RunConfig, placement: Placement) -> tuple[Counter[int], Counter[int]]:
    """Threads that compute on the CPU of each host, for generation and for training."""
    generator, trainer = config.generator, config.trainer
    generating, training = Counter[int](), Counter[int]()
    for host in placement.replica_hosts:
        generating[host] += generator.tensor_parallel * generator.threads
    for host in placement.trainer_hosts:
        training[host] += trainer.threads
    return generating, training


def _crowded_hosts(threads: Counter[int], hosts: Sequence[HostFacts]) -> set[int]:
    """Those with more of these threads than cores."""
    return {host for host, number in threads.items() if number > hosts[host].num_cores}
