"""Checks whether a run fits on its machine or its hosts: devices, cores, memory, open files, and
room for published weights. Also checks how the hosts of a run are named.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from typing import Any

from torchtitan_rl.agents.task import AgentTask
from torchtitan_rl.config.fit import (
    describe_fit,
    device_bytes,
    device_memory_errors,
    fitting_options,
)
from torchtitan_rl.config.machine import (
    MIG,
    HostFacts,
    MachineFacts,
    NoRoomError,
    Placement,
    count,
    device_of,
    host_name,
    host_of,
    made_up_hosts,
    place,
    sharing_proposal,
)
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
from torchtitan_rl.config.plan import ProcessPlan, threads_on_hosts
from torchtitan_rl.config.preflight import CudaFacts, cuda_errors
from torchtitan_rl.config.run import LaunchConfig, RunConfig, existing_parent, has_hosts
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.launch.addresses import Address, address_errors, mixed_errors
from torchtitan_rl.weights.shm_cleanup import HEADROOM_BYTES, SHARED_MEMORY_ROOT

MAX_THREADS_PER_CORE = 4  # on a CPU; more threads only cost memory and context switches
_OTHER_FILES = 256  # files that the controller always has open
_FILES_PER_AGENT = 2
_RANKS = (
    "generator.tensor_parallel",
    "trainer.data_parallel_replicate",
    "trainer.data_parallel_shard",
    "trainer.tensor_parallel",
)


def machine_errors(
    config: RunConfig,
    policy: PolicyFacts | None,
    machine: MachineFacts,
    teachers: Sequence[PolicyFacts] = (),
) -> list[str]:
    """Errors if the run's processes are all on this machine, and it has too few devices or, without
    CUDA, too few cores, or too little memory. Also an error if the controller may open too few
    files for the run's agents."""
    errors = []
    if not has_hosts(config.launch):
        device: Device = "cuda" if machine.cuda_devices else "cpu"
        if device == "cuda":
            errors = _device_errors(config, policy, machine)
        else:
            errors = _thread_errors(config, machine.num_cores)
        if machine.cuda is not None:
            generating = 0 if config.mode == "train" else config.generator.num_ranks
            errors += _cuda_errors(config, machine.cuda, generating)
        if policy is not None:
            errors += device_memory_errors(config, policy, [host_of(machine)])
            errors += too_little_memory(
                config,
                policy,
                machine.memory_bytes,
                device=device,
                replicas=config.generator.replicas,
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
    config: RunConfig, policy: PolicyFacts | None, machine: MachineFacts
) -> list[str]:
    needed = config.together(config.generator.num_ranks, config.trainer.world_size)
    needed += config.teacher_ranks
    devices, errors = machine.cuda_devices, []
    if len(devices) < needed:
        fix = f"give fewer{sharing_proposal(config, len(devices))}"
        if policy is not None and machine.device_bytes:
            fix = describe_fit(fitting_options(config, policy, [host_of(machine)]))
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


def _cuda_errors(
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
    machine: MachineFacts,
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


def find_weight_room(
    config: RunConfig, policy: PolicyFacts, machine: MachineFacts
) -> tuple[str, str]:
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


def launch_errors(config: RunConfig) -> list[str]:
    """Errors in the options that name the hosts. Contacts no host."""
    launch = config.launch
    errors = [*_host_list_errors(launch), *_job_errors(launch)]
    if not errors:
        errors = [*_address_errors(launch), *chosen_host_errors(launch)]
    chosen, generating = launch.trainer_hosts, launch.generator_hosts
    if config.is_colocated and chosen and generating and not {*chosen} & {*generating}:
        errors.append(
            f"placement is colocated: launch.trainer_hosts {chosen} and launch.generator_hosts "
            f"{generating} have no host in common; give one of the two, or placement separate"
        )
    if config.pin_cores and has_hosts(launch):
        errors.append(
            "pin_cores is True: cores are given out on this machine alone; with launch.attach or "
            "launch.hosts, give --no-pin-cores"
        )
    if config.monarch.telemetry and has_hosts(launch):
        errors.append(
            "monarch.telemetry is True: it is for runs on this machine alone; with launch.attach "
            "or launch.hosts, give --monarch.no-telemetry"
        )
    return errors


def unused_options(launch: LaunchConfig) -> list[str]:
    """Notes about options that a run on this machine does not use. They are not errors, because the
    command for torchrun should also work with one node."""
    if has_hosts(launch):
        return []
    given = {"keys": launch.keys, "port": launch.port, "interface": launch.interface}
    return [
        f"launch.{name} is {str(value)!r} and is not used: the run is on this machine alone; for "
        "several give launch.attach, or start it by torchrun"
        for name, value in given.items()
        if value
    ]


def start_errors(launch: LaunchConfig) -> list[str]:
    """Errors for options that only a dry run may have."""
    if not launch.hosts:
        return []
    return [
        f"launch.hosts is {launch.hosts!r}: these hosts are made up, for --dry-run; leave it "
        "out to start, with launch.attach or torchrun for several hosts"
    ]


def host_errors(
    config: RunConfig, policy: PolicyFacts | None, hosts: Sequence[HostFacts]
) -> list[str]:
    """Errors if the hosts lack room for the run: devices, or on the CPU cores and memory."""
    try:
        placement = place(config, hosts)
    except NoRoomError as error:
        if policy is None or not device_bytes(hosts):
            return [str(error)]
        return [f"{error.message}; {describe_fit(fitting_options(config, policy, hosts))}"]
    errors = _transport_errors(config, placement)
    if all(hosts[host].address for host in placement.trainer_hosts):
        errors += _plain_text_errors(config.launch, hosts, placement.trainer_hosts)
    device = device_of(hosts)
    if device == "cuda":
        errors += _host_cuda_errors(config, policy, hosts, placement)
    else:
        errors += _host_thread_errors(config, hosts, placement)
    if policy is None:
        return errors
    errors += device_memory_errors(config, policy, hosts)
    replicas, ranks = Counter(placement.replica_hosts), Counter(placement.trainer_hosts)
    for host, facts in enumerate(hosts):
        errors += too_little_memory(
            config,
            policy,
            facts.memory_bytes,
            device=device,
            replicas=replicas[host],
            trainer_ranks=ranks[host],
            where=host_name(host),
        )
    return errors


def _host_cuda_errors(
    config: RunConfig,
    policy: PolicyFacts | None,
    hosts: Sequence[HostFacts],
    placement: Placement,
) -> list[str]:
    replicas, trained_on = Counter(placement.replica_hosts), {*placement.trainer_hosts}
    is_sent = {*replicas} != trained_on or len(trained_on) > 1
    size = 0
    if policy is not None and is_sent:
        size = version_bytes(config, policy, config.policy.dtype)
    errors = []
    for host in sorted({*replicas} | trained_on):
        if (facts := hosts[host].cuda) is not None:
            devices = replicas[host] * config.generator.tensor_parallel
            where = f"{host_name(host)}: "
            errors += _cuda_errors(config, facts, devices, locked_bytes=size, where=where)
    return errors


def host_notes(launch: LaunchConfig, plan: ProcessPlan) -> list[str]:
    """Notes about a plan without errors: chosen hosts that the plan does not use, and gradients
    that are sent in plain text. For made-up hosts, a note says if a real start would be refused
    because of plain text."""
    trainer = plan.trainer
    if trainer is None:
        return []
    used = {
        "generator_hosts": ("replica", {group.host for group in plan.replicas}),
        "trainer_hosts": ("trainer rank", {part.host for part in trainer.on_each_host()}),
    }
    notes = []
    for name, (part, hosts) in used.items():
        if unused := [host for host in getattr(launch, name) if host not in hosts]:
            notes.append(
                f"launch.{name} is {getattr(launch, name)}: no {part} is on "
                f"{', '.join(map(host_name, unused))}"
            )
    far = _plain_text_between(plan.hosts, trainer.rank_hosts)
    if far and launch.allow_plain_tcp:
        notes.append(f"{far} exchange gradients unencrypted (launch.allow_plain_tcp)")
    refused = _plain_text_errors(launch, plan.hosts, trainer.rank_hosts)
    return notes + [f"a start on several machines is refused: {error}" for error in refused]


def _plain_text_errors(
    launch: LaunchConfig, hosts: Sequence[HostFacts], trainer_hosts: Sequence[int]
) -> list[str]:
    far = _plain_text_between(hosts, trainer_hosts)
    if not far or launch.allow_plain_tcp:
        return []
    return [
        f"launch.allow_plain_tcp is False: {far} would exchange gradients, which gloo and NCCL "
        "do not encrypt; keep the trainer on one host (launch.trainer_hosts), or, where no one "
        "else is in the network, allow it"
    ]


def _plain_text_between(hosts: Sequence[HostFacts], trainer_hosts: Sequence[int]) -> str:
    """Describe the hosts between which trainer ranks exchange gradients; empty if the ranks are on
    one host, or on hosts whose addresses are all loopback addresses."""
    spanned = sorted(set(trainer_hosts))
    are_near = all(
        hosts[host].address and Address.parse(hosts[host].address).is_loopback for host in spanned
    )
    if len(spanned) < 2 or are_near:
        return ""
    return f"trainer ranks on {', '.join(map(host_name, spanned))}"


def _host_list_errors(launch: LaunchConfig) -> list[str]:
    if not launch.hosts:
        return []
    try:
        number = len(made_up_hosts(launch.hosts))
    except ValueError as error:
        return [f"launch.hosts is {launch.hosts!r}: {error}"]
    if launch.attach and number != len(launch.attach):
        return [
            f"launch.hosts is {launch.hosts!r}: launch.attach has "
            f"{count(len(launch.attach), 'host')}; give as many, or one of the two"
        ]
    return []


def _job_errors(launch: LaunchConfig) -> list[str]:
    if not launch.job:
        return []
    field, errors = f"launch.job is {launch.job!r}", []
    module, _, attribute = launch.job.rpartition(".")
    others = {"attach": launch.attach, "keys": launch.keys}
    if not launch.hosts:  # made-up hosts have no meshes
        others |= {name: getattr(launch, name) for name in ("generator_hosts", "trainer_hosts")}
    given = [f"launch.{name}" for name, value in others.items() if value]
    if not module or not attribute:
        errors.append(f"{field}: give MODULE.ATTR, such as jobs.slurm for `slurm` in jobs.py")
    elif not launch.hosts and not _is_package(module.partition(".")[0]):
        errors.append(f"{field}: there is no {module}; give a module of this folder or a package")
    if given:
        errors.append(
            f"{', '.join(given)}: not with launch.job, which has hosts of its own; give one of them"
        )
    if not launch.allow_plain_tcp:
        errors.append(
            "launch.allow_plain_tcp is False: the hosts of launch.job neither encrypt nor "
            "authenticate: anyone who reaches their workers (on one machine, every user of it) can "
            "run programs there; where no one else is, give launch.allow_plain_tcp"
        )
    return errors


def _is_package(name: str) -> bool:
    """Whether Python finds this module or package, also in the working folder. Imports nothing."""
    return PathFinder.find_spec(name, [*sys.path, str(Path.cwd())]) is not None


def _address_errors(launch: LaunchConfig) -> list[str]:
    errors_of = partial(address_errors, keys=launch.keys, allow_plain_tcp=launch.allow_plain_tcp)
    errors = [error for text in launch.attach for error in errors_of("launch.attach", text)][:1]
    if launch.address:
        if not launch.attach:
            return [
                f"launch.address is {launch.address!r}: only workers use it; give launch.attach"
            ]
        errors += errors_of("launch.address", launch.address, is_own=True)
    own = [launch.address] if launch.address else []
    errors += mixed_errors("launch.attach" + ", launch.address" * len(own), [*launch.attach, *own])
    if errors or launch.address:
        return errors
    far = [text for text in launch.attach if not Address.parse(text).is_loopback]
    if far:
        errors.append(
            f"launch.address is '': {far[0]} must reach this controller; give the address of this "
            "machine, such as tls://10.0.0.1:26600"
        )
    return errors


def chosen_host_errors(launch: LaunchConfig) -> list[str]:
    """Errors in the hosts that are chosen for the trainer and the replicas."""
    number = len(made_up_hosts(launch.hosts)) if launch.hosts else len(launch.attach)
    errors = []
    for name in ("generator_hosts", "trainer_hosts"):
        chosen = getattr(launch, name)
        fix = ""
        if chosen and not number:
            fix = "the run is on this machine alone; give launch.attach"
        elif any(host >= number for host in chosen):
            hosts = count(number, "host")
            fix = f"the run has {hosts}, counted from 0; give less than {number}"
        elif len(set(chosen)) < len(chosen):
            fix = "give each host once"
        if fix:
            errors.append(f"launch.{name} is {chosen}: {fix}")
    return errors


def _transport_errors(config: RunConfig, placement: Placement) -> list[str]:
    transport = config.weight_sync.transport
    are_apart = len({*placement.replica_hosts, *placement.trainer_hosts}) > 1
    if transport == "shared_memory" and are_apart:
        return [
            "weight_sync.transport is shared_memory: trainer and replicas are on several hosts, "
            "which share none; give auto or rdma"
        ]
    return []


def _host_thread_errors(
    config: RunConfig, hosts: Sequence[HostFacts], placement: Placement
) -> list[str]:
    generating, training = threads_on_hosts(config, placement)
    is_colocated = config.is_colocated
    threads = generating | training if is_colocated else generating + training
    errors = []
    for host, number in sorted(threads.items()):
        if number <= MAX_THREADS_PER_CORE * hosts[host].num_cores:
            continue
        part = "generator" if generating[host] >= training[host] else "trainer"
        errors.append(
            f"{part}.threads is {getattr(config, part).threads}: {number} threads compute on "
            f"{host_name(host)}, more than {MAX_THREADS_PER_CORE} for each of its "
            f"{count(hosts[host].num_cores, 'core')}; give fewer, fewer processes, or more hosts"
        )
    return errors
