"""Whether a run fits on its machine: devices, cores, memory, room for published weights, files.

Which CUDA devices a process may use, named so that its children can be given some of them.

CUDA counts the devices of ``CUDA_VISIBLE_DEVICES`` from 0 in each process. A child whose mask is to
be one of its parent's devices therefore needs that device's own name: the parent's mask, entry by
entry, or the plain index where the parent has no mask.
"""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from torchtitan_rl.agents.task import AgentTask
from torchtitan_rl.config.checks.paths import existing_parent
from torchtitan_rl.config.hf_model import PolicyFacts
from torchtitan_rl.config.plan import num_devices_needed, num_threads_needed
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.weights.shm_cleanup import HEADROOM_BYTES, SHARED_MEMORY_ROOT

_OVERHEAD_BYTES = 1 << 30  # a process with vLLM or torchtitan imported
MAX_THREADS_PER_CORE = 4  # on a CPU; more only take memory and switch
_OTHER_FILES = 256  # open in the controller, whatever runs
_FILES_PER_AGENT = 2
_RANKS = (
    "generator.tensor_parallel",
    "trainer.data_parallel_replicate",
    "trainer.data_parallel_shard",
    "trainer.tensor_parallel",
)
_CGROUP_CPU = (  # quota and period, of both versions
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What the machine has. ``cuda_devices`` are named as in ``CUDA_VISIBLE_DEVICES``."""

    cuda_devices: tuple[str, ...] = ()
    num_cores: int
    memory_bytes: int
    max_open_files: int | None = None  # of one process; None: any number


def machine_facts() -> MachineFacts:
    """Of the machine that this process runs on, as far as it may use it."""
    import psutil
    import torch

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        cuda_devices=visible_devices(
            os.environ.get(VARIABLE), num_visible=torch.cuda.device_count()
        ),
        num_cores=min([len(os.sched_getaffinity(0)), *_cgroup_cores()]),
        memory_bytes=min(psutil.virtual_memory().total, *_cgroup_limits()),
        max_open_files=None if soft == resource.RLIM_INFINITY else soft,
    )


def max_rollouts(config: RunConfig) -> int:
    """At most so many run at once: those of every group in the buffer, and those of an evaluation.

    Raises:
        ValueError: the schedule is not possible.
    """
    evaluation = config.evaluation.num_problems * config.evaluation.samples_per_problem
    return config.capacity.buffer * config.rollout.group_size + evaluation


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
    if threads <= MAX_THREADS_PER_CORE * machine.num_cores:
        return []
    generator, trainer = config.generator, config.trainer
    fields = ("generator.replicas", "generator.threads", "trainer.threads", *_RANKS)
    return [
        f"{_largest(config, *fields)}: replicas and trainer compute in {threads} threads "
        f"({generator.replicas * generator.tensor_parallel} generator ranks x "
        f"{generator.threads} + {trainer.world_size} trainer ranks x {trainer.threads}), "
        f"more than {MAX_THREADS_PER_CORE} for each of {machine.num_cores} cores; give fewer"
    ]


def _largest(config: RunConfig, *names: str) -> str:
    """Which of these fields is the largest number, with its value: the one to change."""
    values = {name: attrgetter(name)(config) for name in names}
    name = max(values, key=lambda name: values[name])
    return f"{name} is {values[name]}"


def _device_errors(config: RunConfig, machine: MachineFacts) -> list[str]:
    devices, needed = machine.cuda_devices, num_devices_needed(config)
    errors = []
    if len(devices) < needed:
        errors.append(
            f"{_largest(config, 'generator.replicas', *_RANKS)}: replicas and trainer need "
            f"{needed} CUDA devices, and {_visible(devices)}; give fewer"
        )
    if devices[0].startswith(MIG):
        errors += [
            f"{name} is {ranks}: ranks that exchange data cannot each have a MIG instance; give 1, "
            "or whole devices"
            for name in _RANKS
            if (ranks := attrgetter(name)(config)) > 1
        ]
    return errors


def _visible(devices: tuple[str, ...]) -> str:
    return "1 is visible" if len(devices) == 1 else f"{len(devices)} are visible"


def serving_errors(
    generator: GeneratorConfig, policy: PolicyFacts, machine: MachineFacts
) -> list[str]:
    """Whether there are devices, or on the CPU memory, for replicas alone."""
    ranks = generator.replicas * generator.tensor_parallel
    if not machine.cuda_devices:
        needed = generator.replicas * replica_bytes(generator, policy)
        return too_little_memory(generator, policy, needed, machine.memory_bytes)
    if ranks <= len(machine.cuda_devices):
        return []
    return [
        f"generator.replicas is {generator.replicas}: with generator.tensor_parallel "
        f"{generator.tensor_parallel} they need {ranks} CUDA devices, and "
        f"{_visible(machine.cuda_devices)}; give fewer"
    ]


def num_published_versions(config: RunConfig) -> int:
    """Versions of the weights that are readable or being written at a time, at most: the current
    one, the one before and the new one; with evaluation also those that wait for it to end."""
    return 3 + (config.schedule.staleness if config.evaluation.num_problems > 0 else 0)


def memory_errors(config: RunConfig, policy: PolicyFacts, machine: MachineFacts) -> list[str]:
    """CPU runs only: the engines, four copies of the float32 weights in the trainer, one more for
    a reference policy, and the published versions."""
    if machine.cuda_devices:
        return []
    needed = sum(memory_use(config, policy).values())
    return too_little_memory(config.generator, policy, needed, machine.memory_bytes)


def memory_use(config: RunConfig, policy: PolicyFacts) -> dict[str, int]:
    """Bytes that a run on a CPU takes, by part."""
    return {
        "replicas": config.generator.replicas * replica_bytes(config.generator, policy),
        "trainer": trainer_bytes(config, policy),
        "published weights": published_bytes(config, policy),
    }


def trainer_bytes(config: RunConfig, policy: PolicyFacts) -> int:
    """Memory of a trainer on the CPU, all ranks together."""
    trainer = config.trainer
    copies = 5 if trainer.loss.kl_coefficient > 0 else 4
    weights = copies * trainer.data_parallel_replicate * policy.num_bytes_as("float32")
    return weights + trainer.world_size * _OVERHEAD_BYTES


def published_bytes(config: RunConfig, policy: PolicyFacts) -> int:
    """Memory of the published versions, on the CPU."""
    return num_published_versions(config) * policy.num_bytes_as("float32")


def replica_bytes(generator: GeneratorConfig, policy: PolicyFacts) -> int:
    """Memory of one replica on the CPU. Its ranks share its weights, which are there twice: as
    parameters, and packed."""
    rank = generator.kv_cache_bytes + _OVERHEAD_BYTES
    return 2 * policy.num_bytes_as("float32") + generator.tensor_parallel * rank


def too_little_memory(
    generator: GeneratorConfig,
    policy: PolicyFacts,
    needed: int,
    memory_bytes: int,
    *,
    where: str = "the machine",
) -> list[str]:
    """The error, if all processes of a machine need more memory than it has."""
    if needed <= memory_bytes:
        return []
    caches = generator.tensor_parallel * generator.kv_cache_bytes
    name = "kv_cache_bytes" if 2 * caches > replica_bytes(generator, policy) else "replicas"
    return [
        f"generator.{name} is {getattr(generator, name)}: all processes need about "
        f"{needed / 2**30:.0f} GiB and {where} has {memory_bytes / 2**30:.0f} GiB; "
        "give fewer generator.replicas or a smaller generator.kv_cache_bytes"
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


def find_weight_room(config: RunConfig, policy: PolicyFacts, machine: MachineFacts) -> WeightRoom:
    """In shared memory and, where that is another file system, in the run's folder."""
    if config.weight_sync.transport == "rdma":
        return WeightRoom()
    dtype = config.policy.dtype if machine.cuda_devices else "float32"
    free: dict[Path, int] = {}
    devices: set[int] = set()
    for place in (SHARED_MEMORY_ROOT, config.run_dir.absolute()):
        parent = existing_parent(place)
        device = parent.stat().st_dev
        if device not in devices:
            free[place] = shutil.disk_usage(parent).free
            devices.add(device)
    return weight_room(
        num_versions=num_published_versions(config),
        num_bytes=policy.num_bytes_as(dtype),
        free=free,
        root=SHARED_MEMORY_ROOT,
    )


def weight_room(
    *, num_versions: int, num_bytes: int, free: Mapping[Path, int], root: Path
) -> WeightRoom:
    """Each version goes where `SharedMemoryPublisher` would put it: to ``root`` while it has room,
    else to the other place. ``free`` has the free bytes of both."""
    fitting = {
        place: min(num_versions, max(0, room - HEADROOM_BYTES) // max(1, num_bytes))
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
            f"{others}"
        )
    return WeightRoom()


def _cgroup_cores() -> list[int]:
    """As many as this process's container may keep busy, where it has such a limit."""
    cores: list[int] = []
    for paths in _CGROUP_CPU:
        try:
            quota, period = " ".join(Path(path).read_text() for path in paths).split()
            cores += [math.ceil(int(quota) / int(period))] if int(quota) > 0 else []
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return cores


def _cgroup_limits() -> list[int]:
    """The memory limit of this process's container, where it has one."""
    limits = []
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return limits


VARIABLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"
_INDEX = re.compile(
    r"[ \t\n\v\f\r]*\+?(?P<digits>\d+)"
)  # as C reads a number: what follows is left


def visible_devices(mask: str | None, *, num_visible: int) -> tuple[str, ...]:
    """The names of the devices that a process with this mask sees, in its order.

    Args:
        mask: the value of ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        num_visible: how many devices CUDA reports to that process, which settles what the mask
            alone does not say: whether an index or UUID exists. (It reports no more than one MIG
            instance to a process; each child may be given another.)

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
    """The entries of a mask up to the first one that names no device, as CUDA reads them.

    An index may be followed by other characters, which CUDA ignores. The first entry says whether
    all are indices, ``GPU-`` UUIDs (or beginnings of them) or ``MIG-`` names; another kind ends the
    list. A device that is named twice makes the whole mask invalid: none is visible.
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
    """The kind of an entry (None: it names no device), and the name to pass on."""
    text = entry.strip()
    for prefix in ("GPU-", MIG):
        if text.startswith(prefix):
            return prefix, text
    index = _INDEX.match(entry)
    return ("index", str(int(index["digits"]))) if index else (None, "")
