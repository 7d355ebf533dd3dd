"""Plans replicas that are added to a running run, with what its processes leave free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchtitan_rl.config.machine import HostFacts, NoRoomError, host_name, machine_facts
from torchtitan_rl.config.plan import ProcessGroup, plan_replica
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.room import MAX_THREADS_PER_CORE
from torchtitan_rl.errors import ConfigError


def plan_replicas(
    prepared: PreparedRun, running: Sequence[ProcessGroup], indices: Iterable[int]
) -> list[ProcessGroup]:
    """Plan a replica for each index; its name and its seed follow from the index. ``running``: the
    replicas that run. Raises ConfigError if there is no room for all of them.

    Each is on the host with the fewest replicas, of those that have room and for which the run's
    plan has replicas: only these hosts get weights.
    """
    plan, replicas = prepared.plan, list(running)
    facts = plan.hosts or (machine_facts(),)
    others = [*plan.teachers, *(() if plan.trainer is None else plan.trainer.on_each_host())]
    for index in indices:
        on_host = {
            host: [one for one in replicas if one.host == host]
            for host in sorted({group.host for group in plan.replicas})
        }
        reasons = []
        for host in sorted(on_host, key=lambda one: len(on_host[one])):
            used = [*on_host[host], *(one for one in others if one.host == host)]
            try:
                group = _replica_on(facts[host], prepared, index, used)
                replicas.append(replace(group, host=host))
                break
            except NoRoomError as error:
                reasons.append(f"{host_name(host)}: {error}" if plan.hosts else f"{error}")
        else:
            raise ConfigError(
                f"{'; '.join(reasons)}; with those that run, there is room for "
                f"--replicas {len(replicas)}"
            )
    return replicas[len(running) :]


def _replica_on(
    host: HostFacts, prepared: PreparedRun, index: int, used: Sequence[ProcessGroup]
) -> ProcessGroup:
    """Plan a replica on a host, where the groups ``used`` run. Raises NoRoomError."""
    config, plan, memory = prepared.config, prepared.plan, prepared.memory
    taken = {one for group in used for one in (*group.devices, *group.cores)}
    devices = [device for device in host.cuda_devices if device not in taken]
    # Cores are pinned only where all processes are on this machine.
    pinned = os.sched_getaffinity(0) if config.pin_cores and not plan.hosts else set()
    cores = sorted(pinned - taken)
    ranks, free = config.generator.tensor_parallel, len(devices)
    threads = ranks * config.generator.threads
    group = plan_replica(config.generator, config.seed, index, devices, list(cores))
    if plan.device == "cuda":
        if free < ranks:
            raise NoRoomError(f"no free device: a replica needs {ranks}, and {free} are free")
        return group
    if pinned and len(cores) < threads:
        raise NoRoomError(
            f"no free core: a replica needs {threads} (pin_cores), and {len(cores)} are free"
        )
    threads += sum(one.ranks * one.threads for one in used)
    if threads > MAX_THREADS_PER_CORE * host.num_cores:
        raise NoRoomError(
            f"no free core: {threads} threads are more than {MAX_THREADS_PER_CORE} for each of "
            f"{host.num_cores} cores"
        )
    if memory is not None:
        bytes_of = {"trainer": memory.trainer, "teacher": memory.teacher}
        needed = sum(
            one.ranks * sum(bytes_of.get(one.name.rstrip("0123456789"), memory.replica).values())
            for one in (group, *used)
        )
        if needed > host.memory_bytes:
            raise NoRoomError(
                f"no free memory: all processes need about {needed / 2**30:.0f} GiB, and there are "
                f"{host.memory_bytes / 2**30:.0f} GiB"
            )
    return replace(group, yields_cores=threads > host.num_cores)
