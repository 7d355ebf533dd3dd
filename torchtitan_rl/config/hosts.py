"""Checks how the hosts of a run are named and reached, and whether the run fits on them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from torchtitan_rl.config.fit import (
    describe_fit,
    device_bytes,
    device_memory_errors,
    fitting_options,
)
from torchtitan_rl.config.machine import (
    HostFacts,
    NoRoomError,
    Placement,
    count,
    device_of,
    host_name,
    made_up_hosts,
    place,
)
from torchtitan_rl.config.memory import version_bytes
from torchtitan_rl.config.model import PolicyFacts
from torchtitan_rl.config.plan import ProcessPlan, threads_on_hosts
from torchtitan_rl.config.room import MAX_THREADS_PER_CORE, cuda_errors_of_run, too_little_memory
from torchtitan_rl.config.run import LaunchConfig, RunConfig, has_hosts
from torchtitan_rl.launch.addresses import Address, address_errors, mixed_errors


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
    errors = []
    are_apart = len({*placement.replica_hosts, *placement.trainer_hosts}) > 1
    if config.weight_sync.transport == "shared_memory" and are_apart:
        errors.append(
            "weight_sync.transport is shared_memory: trainer and replicas are on several hosts, "
            "which share none; give auto or rdma"
        )
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
            errors += cuda_errors_of_run(config, facts, devices, locked_bytes=size, where=where)
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
    folders = [*sys.path, str(Path.cwd())]
    others = {"attach": launch.attach, "keys": launch.keys}
    if not launch.hosts:  # made-up hosts have no meshes
        others |= {name: getattr(launch, name) for name in ("generator_hosts", "trainer_hosts")}
    given = [f"launch.{name}" for name, value in others.items() if value]
    if not module or not attribute:
        errors.append(f"{field}: give MODULE.ATTR, such as jobs.slurm for `slurm` in jobs.py")
    elif not launch.hosts and not PathFinder.find_spec(module.partition(".")[0], folders):
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


def _host_thread_errors(
    config: RunConfig, hosts: Sequence[HostFacts], placement: Placement
) -> list[str]:
    generating, training = threads_on_hosts(config, placement)
    threads = generating | training if config.is_colocated else generating + training
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
