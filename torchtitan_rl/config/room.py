"""Checks whether a run fits on its machine: devices, cores, memory, open files, and room for
published weights. `hosts` does for several hosts.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from torchtitan_rl.agents.task import AgentTask
from torchtitan_rl.config.fit import describe_fit, device_memory_errors, fitting_options
from torchtitan_rl.config.machine import MIG, TRAINER_RANKS, HostFacts, sharing_proposal
from torchtitan_rl.config.memory import (
    PINNED,
    PROCESS_BYTES,
    PUBLISHED,
    SLEEPING,
    Device,
    memory_plan,
    replica_memory,
    version_bytes,
)
from torchtitan_rl.config.model import PolicyFacts
from torchtitan_rl.config.preflight import CudaFacts, cuda_errors
from torchtitan_rl.config.run import RunConfig, existing_parent, has_hosts
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.weights.shm_cleanup import HEADROOM_BYTES, SHARED_MEMORY_ROOT

MAX_THREADS_PER_CORE = 4  # on a CPU; more threads only cost memory and context switches
_OTHER_FILES = 256  # files that the controller always has open
_FILES_PER_AGENT = 2
_RANKS = ("generator.tensor_parallel", *(f"trainer.{name}" for name in TRAINER_RANKS))


def machine_errors(
    config: RunConfig,
    policy: PolicyFacts | None,
    machine: HostFacts,
    teachers: Sequence[PolicyFacts] = (),
) -> list[str]:
    """Errors if the run's processes are all on this machine, and it has too few devices or, without
    CUDA, too few cores, or too little memory. Also an error if the controller may open too few
    files for the run's agents."""
    errors = []
    if not has_hosts(config.launch):
        device: Device = "cuda" if machine.cuda_devices else "cpu"
        if device == "cuda":
            errors = _device_errors(config, policy, machine, teachers)
        else:
            errors = _thread_errors(config, machine.num_cores)
        if machine.cuda is not None:
            generating = 0 if config.mode == "train" else config.generator.num_ranks
            errors += cuda_errors_of_run(config, machine.cuda, generating)
        if policy is not None:
            errors += device_memory_errors(config, policy, [machine], teachers)
            errors += too_little_memory(
                config,
                policy,
                machine.memory_bytes,
                device=device,
                replicas=config.generator.num_local,
                trainer_ranks=config.trainer.world_size,
                teachers=teachers,
            )
    limit = machine.max_open_files
    # Each running agent has open connections in the controller.
    needed = _OTHER_FILES + _FILES_PER_AGENT * config.max_rollouts
    if isinstance(config.task, AgentTask) and limit is not None and needed > limit:
        errors.append(
            f"rollout.groups_per_step is {config.rollout.groups_per_step}: up to "
            f"{config.max_rollouts} agents at once need {needed} open files, and a process may "
            f"have {limit}; raise that (ulimit -n {needed}), or give fewer"
        )
    return errors


def _thread_errors(config: RunConfig, num_cores: int) -> list[str]:
    generator, trainer = config.generator, config.trainer
    threads = config.together(generator.num_threads, trainer.num_threads)
    threads += config.teacher_ranks * generator.threads
    if config.pin_cores and threads > num_cores:
        return [
            f"pin_cores is True: replicas and trainer compute in {threads} threads, and there are "
            f"{num_cores} cores; give fewer threads or replicas, or --no-pin-cores"
        ]
    if threads <= MAX_THREADS_PER_CORE * num_cores:
        return []
    fields = ("generator.replicas", "generator.threads", "trainer.threads", *_RANKS)
    return [
        f"{_largest(config, *fields)}: replicas and trainer compute in {threads} threads "
        f"({generator.num_ranks} generator ranks x {generator.threads} + {trainer.world_size} "
        f"trainer ranks x {trainer.threads}), more than {MAX_THREADS_PER_CORE} for each of "
        f"{num_cores} cores; give fewer"
    ]


def _largest(config: RunConfig, *names: str) -> str:
    """The field with the largest value, and its value, for messages: this is the one to change."""
    values = {name: attrgetter(name)(config) for name in names}
    name = max(values, key=lambda name: values[name])
    return f"{name} is {values[name]}"


def _device_errors(
    config: RunConfig,
    policy: PolicyFacts | None,
    machine: HostFacts,
    teachers: Sequence[PolicyFacts],
) -> list[str]:
    needed = config.together(config.generator.num_ranks, config.trainer.world_size)
    needed += config.teacher_ranks
    devices, errors = machine.cuda_devices, []
    if len(devices) < needed:
        fix = f"give fewer{sharing_proposal(config, len(devices))}"
        if policy is not None and machine.device_bytes:
            fix = describe_fit(fitting_options(config, policy, [machine], teachers=teachers))
        who = "replicas, trainer and teachers" if config.teacher_ranks else "replicas and trainer"
        errors.append(
            f"{_largest(config, 'generator.replicas', *_RANKS)}: {who} need "
            f"{needed} CUDA devices, and {_visible(devices)}; {fix}"
        )
    if devices[0].startswith(MIG):
        errors += [
            f"{name} is {ranks}: ranks that exchange data cannot each have a MIG instance; give 1, "
            "or whole devices"
            for name in _RANKS
            if (ranks := attrgetter(name)(config)) > 1
        ]
    return errors


def cuda_errors_of_run(
    config: RunConfig, facts: CudaFacts, replica_devices: int, **between_hosts: Any
) -> list[str]:
    """`cuda_errors` of a machine whose first ``replica_devices`` devices are the replicas'."""
    ranks = max(config.trainer.world_size, config.generator.tensor_parallel)
    return cuda_errors(
        facts,
        dtype=config.policy.dtype,
        replica_devices=range(replica_devices),
        memory_share=config.generator.gpu_memory_utilization,
        exchanges=ranks > 1,
        **between_hosts,
    )


def _visible(devices: tuple[str, ...]) -> str:
    return "1 is visible" if len(devices) == 1 else f"{len(devices)} are visible"


def serving_errors(
    generator: GeneratorConfig,
    policy: PolicyFacts,
    machine: HostFacts,
    *,
    dtype: str,
    adapters: int = 0,
) -> list[str]:
    """Errors if this machine has too few devices or, without CUDA, too little memory, for replicas
    without a trainer. ``adapters`` as in `replica_memory`."""
    if not machine.cuda_devices:
        parts = replica_memory(generator, policy, device="cpu", adapters=adapters)
        rank = sum(parts.values())
        needed = generator.num_ranks * rank
        return _memory_errors(generator, policy, needed, machine.memory_bytes, "the machine")
    errors = []
    if generator.num_ranks > len(machine.cuda_devices):
        errors.append(
            f"generator.replicas is {generator.replicas}: with generator.tensor_parallel "
            f"{generator.tensor_parallel} they need {generator.num_ranks} CUDA devices, and "
            f"{_visible(machine.cuda_devices)}; give fewer"
        )
    if machine.cuda is not None:
        errors += cuda_errors(
            machine.cuda,
            dtype=dtype,
            replica_devices=range(generator.num_ranks),
            memory_share=generator.gpu_memory_utilization,
            exchanges=generator.tensor_parallel > 1,
        )
    return errors


def needed_bytes(
    config: RunConfig,
    policy: PolicyFacts,
    *,
    replicas: int,
    trainer_ranks: int,
    device: Device,
    teachers: Sequence[PolicyFacts] = (),
) -> int:
    """The memory that a host needs for some of a run's replicas and trainer ranks, and for its
    teachers. On CUDA it holds processes, published weights and the trainer's offloaded state."""
    plan = memory_plan(config, policy, device=device, teachers=teachers)
    published = plan.host.get(PUBLISHED, 0) if replicas or trainer_ranks else 0
    ranks = replicas * config.generator.tensor_parallel
    if device == "cuda":
        pinned = plan.host.get(PINNED, 0) * trainer_ranks // config.trainer.world_size
        asleep = plan.host.get(SLEEPING, 0) * replicas // config.generator.replicas
        ranks += config.teacher_ranks if teachers else 0
        return (ranks + trainer_ranks) * PROCESS_BYTES + pinned + asleep + published
    replica, trainer = sum(plan.replica.values()), sum(plan.trainer.values())
    of_teachers = config.teacher_ranks * sum(plan.teacher.values())
    return ranks * replica + trainer_ranks * trainer + of_teachers + published


def too_little_memory(
    config: RunConfig,
    policy: PolicyFacts,
    memory_bytes: int,
    *,
    device: Device,
    replicas: int,
    trainer_ranks: int,
    where: str = "the machine",
    teachers: Sequence[PolicyFacts] = (),
) -> list[str]:
    """The error if all processes of a machine together need more memory than it has."""
    needed = needed_bytes(
        config,
        policy,
        replicas=replicas,
        trainer_ranks=trainer_ranks,
        device=device,
        teachers=teachers,
    )
    if device == "cpu":
        return _memory_errors(config.generator, policy, needed, memory_bytes, where)
    if needed <= memory_bytes:
        return []
    what, state, fix = f"generator.replicas is {config.generator.replicas}", "", "fewer"
    if config.is_colocated:
        what, state, fix = "placement is colocated", ", the trainer's pinned state", "separate"
    return [
        f"{what}: processes{state} and published weights need about {needed / 2**30:.0f} GiB of "
        f"host memory and {where} has {memory_bytes / 2**30:.0f} GiB; give {fix}, or more memory"
    ]


def _memory_errors(
    generator: GeneratorConfig, policy: PolicyFacts, needed: int, memory_bytes: int, where: str
) -> list[str]:
    if needed <= memory_bytes:
        return []
    rank = replica_memory(generator, policy, device="cpu")
    name = "kv_cache_bytes" if 2 * rank["KV cache"] > sum(rank.values()) else "replicas"
    return [
        f"generator.{name} is {getattr(generator, name)}: all processes need about "
        f"{needed / 2**30:.0f} GiB and {where} has {memory_bytes / 2**30:.0f} GiB; "
        "give fewer generator.replicas or a smaller generator.kv_cache_bytes"
    ]


def find_weight_room(config: RunConfig, policy: PolicyFacts, machine: HostFacts) -> tuple[str, str]:
    """Call `weight_room` for the folders of this machine: shared memory and, if it is on another
    file system, the run's folder."""
    if config.weight_sync.transport == "rdma":
        return "", ""
    dtype = config.policy.dtype if machine.cuda_devices else "float32"
    free: dict[Path, int] = {}
    devices: set[int] = set()
    for folder in (SHARED_MEMORY_ROOT, config.run_dir.absolute()):
        parent = existing_parent(folder)
        device = parent.stat().st_dev
        if device not in devices:
            free[folder] = shutil.disk_usage(parent).free
            devices.add(device)
    return weight_room(
        num_versions=config.num_published_versions,
        num_bytes=version_bytes(config, policy, dtype),
        free=free,
        root=SHARED_MEMORY_ROOT,
    )


def weight_room(
    *, num_versions: int, num_bytes: int, free: Mapping[Path, int], root: Path
) -> tuple[str, str]:
    """The error if there is no room for the published versions, and a note if not all of them go to
    shared memory. Each is empty if there is nothing to say.

    Each version goes where `SharedMemoryPublisher` would put it: to ``root`` while it has room,
    otherwise to the other folder. ``free`` has the free bytes of both folders.
    """
    fitting = {
        folder: min(num_versions, max(0, room - HEADROOM_BYTES) // max(1, num_bytes))
        for folder, room in free.items()
    }
    places = ", ".join(f"{folder} has {room >> 20} MiB free" for folder, room in free.items())
    what = f"{num_versions} versions of the weights, {max(1, num_bytes >> 20)} MiB each"
    if sum(fitting.values()) < num_versions:
        error = (
            f"weight_sync.transport is shared_memory or auto: there is no room for {what} "
            f"({places}); free some, mount a larger {root}, or give another output_dir"
        )
        return error, ""
    if fitting[root] == num_versions:
        return "", ""
    others = " and ".join(str(folder) for folder in free if folder != root)
    note = f"weights: {root} has room for {fitting[root]} of {what}; the others go to {others}"
    return "", note
