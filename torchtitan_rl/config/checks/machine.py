"""Whether a run fits on its machine: devices, cores, memory, room for published weights, files."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.agents.task import AgentTask
from torchtitan_rl.config.checks.devices import MIG
from torchtitan_rl.config.checks.generator import ENGINE_OVERHEAD_BYTES, MachineFacts, PolicyFacts
from torchtitan_rl.config.plan import num_devices_needed, num_threads_needed
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.orchestration.capacity import derive_capacity

MAX_THREADS_PER_CORE = 4  # on a CPU; more only take memory and switch
_OTHER_FILES = 256  # open in the controller, whatever runs
_FILES_PER_AGENT = 2
_HEADROOM_BYTES = 16 << 20  # others use the shared-memory file system too
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_facts() -> MachineFacts:
    """Of the machine that this process runs on, as far as it may use it."""
    import psutil
    import torch

    from torchtitan_rl.config.checks.devices import VARIABLE, visible_devices

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        cuda_devices=visible_devices(
            os.environ.get(VARIABLE), num_visible=torch.cuda.device_count()
        ),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=min(psutil.virtual_memory().total, *_cgroup_limits()),
        max_open_files=None if soft == resource.RLIM_INFINITY else soft,
    )


def max_rollouts(config: RunConfig) -> int:
    """At most so many run at once: those of every group in the buffer, and those of a validation.

    Raises:
        ValueError: the schedule is not possible.
    """
    capacity = derive_capacity(
        groups_per_step=config.rollout.groups_per_step,
        staleness=config.schedule.staleness,
        window=config.schedule.window,
    )
    validation = config.validation.num_problems * config.validation.samples_per_problem
    return capacity.buffer * config.rollout.group_size + validation


def parallelism_errors(config: RunConfig, machine: MachineFacts) -> list[str]:
    """Whether there are devices, or on the CPU cores, for all ranks."""
    if machine.cuda_devices:
        return _device_errors(config, machine)
    threads = num_threads_needed(config)
    if config.pin_cores and threads > machine.num_cores:
        return [
            f"pin_cores is True: replicas and trainer compute in {threads} threads, and there are "
            f"{machine.num_cores} cores; give fewer threads or replicas, or --no-pin-cores"
        ]
    most = MAX_THREADS_PER_CORE * machine.num_cores
    if threads <= most:
        return []
    generator, trainer = config.generator, config.trainer
    return [
        f"{_largest_part(config)}: replicas and trainer compute in {threads} threads "
        f"({generator.replicas * generator.tensor_parallel} generator ranks x "
        f"{generator.threads} + {trainer.world_size} trainer ranks x {trainer.threads}), "
        f"more than {MAX_THREADS_PER_CORE} for each of {machine.num_cores} cores; give fewer"
    ]


def _largest_part(config: RunConfig) -> str:
    """The field that has the largest share in the number of threads, with its value."""
    generator, trainer = config.generator, config.trainer
    shares = {
        "generator.replicas": generator.replicas,
        "generator.tensor_parallel": generator.tensor_parallel,
        "generator.threads": generator.threads,
        "trainer.data_parallel_replicate": trainer.data_parallel_replicate,
        "trainer.data_parallel_shard": trainer.data_parallel_shard,
        "trainer.tensor_parallel": trainer.tensor_parallel,
        "trainer.threads": trainer.threads,
    }
    name = max(shares, key=lambda name: shares[name])
    return f"{name} is {shares[name]}"


def _device_errors(config: RunConfig, machine: MachineFacts) -> list[str]:
    devices, needed = machine.cuda_devices, num_devices_needed(config)
    errors = []
    if len(devices) < needed:
        errors.append(
            f"generator.replicas is {config.generator.replicas}: with "
            f"generator.tensor_parallel {config.generator.tensor_parallel} and "
            f"{config.trainer.world_size} trainer ranks the run needs {needed} CUDA devices, and "
            f"{len(devices)} are visible; give fewer"
        )
    groups = {
        "generator.tensor_parallel": config.generator.tensor_parallel,
        "the number of trainer ranks": config.trainer.world_size,
    }
    if devices[0].startswith(MIG):
        errors += [
            f"{name} is {ranks}: ranks that exchange data cannot each have a MIG instance; give 1, "
            "or whole devices"
            for name, ranks in groups.items()
            if ranks > 1
        ]
    return errors


def num_published_versions(config: RunConfig) -> int:
    """Versions of the weights that are readable or being written at a time, at most: the current
    one, the one before and the new one; with validation also those that wait for it to end."""
    return 3 + (config.schedule.staleness if config.validation.num_problems > 0 else 0)


def published_bytes(config: RunConfig, policy: PolicyFacts, machine: MachineFacts) -> int:
    """Of one version."""
    return policy.num_bytes_as(config.policy.dtype if machine.cuda_devices else "float32")


def memory_errors(config: RunConfig, policy: PolicyFacts, machine: MachineFacts) -> list[str]:
    """CPU runs only: float32 weights twice in every engine, four copies in the trainer, one more
    for a reference policy, and the published versions."""
    if machine.cuda_devices:
        return []
    weights = policy.num_bytes_as("float32")
    engines = config.generator.replicas * config.generator.tensor_parallel
    copies = 5 if config.trainer.loss.kl_coefficient > 0 else 4
    needed = (
        engines * (weights + config.generator.kv_cache_bytes + ENGINE_OVERHEAD_BYTES)
        + copies * weights * config.trainer.data_parallel_replicate
        + config.trainer.world_size * ENGINE_OVERHEAD_BYTES
        + num_published_versions(config) * weights
    )
    if needed <= machine.memory_bytes:
        return []
    return [
        f"generator.replicas is {config.generator.replicas}: the run needs about "
        f"{needed / 2**30:.0f} GiB and the machine has {machine.memory_bytes / 2**30:.0f} GiB; "
        "give fewer replicas or a smaller generator.kv_cache_bytes"
    ]


def file_errors(config: RunConfig, machine: MachineFacts) -> list[str]:
    """Agents hold connections in the controller, as many as there are rollouts."""
    if machine.max_open_files is None or not isinstance(config.task, AgentTask):
        return []
    rollouts = max_rollouts(config)
    needed = _OTHER_FILES + _FILES_PER_AGENT * rollouts
    if needed <= machine.max_open_files:
        return []
    return [
        f"rollout.groups_per_step is {config.rollout.groups_per_step}: up to {rollouts} agents at "
        f"once need {needed} open files, and a process may have {machine.max_open_files}; raise "
        f"that (ulimit -n {needed}), or give fewer"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRoom:
    """Whether there is room for the published versions: ``error`` is empty where there is, and
    ``note`` where all of them go to shared memory."""

    error: str = ""
    note: str = ""


def weight_room(
    *, num_versions: int, num_bytes: int, free: Mapping[Path, int], root: Path
) -> WeightRoom:
    """Each version goes where `SharedMemoryPublisher` would put it: to ``root`` while it has room,
    else to the other place. ``free`` has the free bytes of both."""
    fitting = {
        place: min(num_versions, max(0, room - _HEADROOM_BYTES) // max(1, num_bytes))
        for place, room in free.items()
    }
    places = ", ".join(f"{place} has {room >> 20} MiB free" for place, room in free.items())
    what = f"{num_versions} versions of the weights, {max(1, num_bytes >> 20)} MiB each"
    if sum(fitting.values()) < num_versions:
        return WeightRoom(
            error=f"weight_sync.transport is shared_memory or auto: there is no room for {what} "
            f"({places}); free some, mount a larger {root}, or give another output_dir"
        )
    if fitting[root] < num_versions:
        others = " and ".join(str(place) for place in free if place != root)
        return WeightRoom(
            note=f"weights: {root} has room for {fitting[root]} of {what}; the others go to "
            f"{others}, which is slower"
        )
    return WeightRoom()


def free_bytes(place: Path) -> int:
    """Of the file system that ``place`` is on, or would be; 0 where that cannot be known."""
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return 0


def _cgroup_limits() -> list[int]:
    """The memory limit of this process's container, where it has one."""
    limits = []
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return limits
