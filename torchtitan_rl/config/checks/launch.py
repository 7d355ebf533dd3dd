"""Whether a run's hosts are named rightly, and whether they have room for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torchtitan_rl.config.checks.machine import (
    MAX_THREADS_PER_CORE,
    published_bytes,
    replica_bytes,
    too_little_memory,
    trainer_bytes,
)
from torchtitan_rl.config.hf_model import PolicyFacts
from torchtitan_rl.config.host_plan import threads_on_hosts
from torchtitan_rl.config.hosts import HostFacts, count, device_of, host_name, made_up_hosts
from torchtitan_rl.config.launch import LaunchConfig, has_hosts
from torchtitan_rl.config.placement import NoRoomError, Placement, place
from torchtitan_rl.config.plan import ProcessPlan
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.addresses import Address, address_errors, mixed_errors


def launch_errors(config: RunConfig) -> list[str]:
    """What is wrong with the hosts as they are named; contacts none of them."""
    launch = config.launch
    errors = _host_list_errors(launch)
    if not errors:
        errors = [*_address_errors(launch), *_chosen_host_errors(launch)]
    chosen, generating = launch.trainer_hosts, launch.generator_hosts
    if config.placement == "colocated" and chosen and generating and not {*chosen} & {*generating}:
        errors.append(
            f"placement is colocated: launch.trainer_hosts {chosen} and launch.generator_hosts "
            f"{generating} have no host in common; give one of the two, or placement separate"
        )
    if config.pin_cores and (launch.attach or launch.hosts):
        errors.append(
            "pin_cores is True: cores are given out on this machine alone; with launch.attach or "
            "launch.hosts, give --no-pin-cores"
        )
    return errors


def unused_options(launch: LaunchConfig) -> list[str]:
    """What a start does not use. No errors: torchrun's command is the same for one node."""
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
    """What only a dry run may have."""
    if not launch.hosts:
        return []
    return [
        f"launch.hosts is {launch.hosts!r}: these hosts are made up, for --dry-run; give "
        "launch.attach to start"
    ]


def host_errors(
    config: RunConfig, policy: PolicyFacts | None, hosts: Sequence[HostFacts]
) -> list[str]:
    """Whether the hosts have room for the run: devices, or on the CPU cores and memory."""
    try:
        placement = place(config, hosts)
    except NoRoomError as error:
        return [str(error)]
    errors = _transport_errors(config, placement)
    if all(hosts[host].address for host in placement.trainer_hosts):
        errors += _plain_text_errors(config.launch, hosts, placement.trainer_hosts)
    if device_of(hosts) == "cuda":
        return errors
    errors += _thread_errors(config, hosts, placement)
    return errors + (_memory_errors(config, policy, hosts, placement) if policy else [])


def host_notes(config: RunConfig, plan: ProcessPlan) -> list[str]:
    """What a user should know of a plan without errors: chosen hosts that it does not use, and
    gradients in plain text, or for made-up hosts that a start between machines would be refused."""
    launch, trainer = config.launch, plan.trainer
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
    """The trainer ranks whose process groups leave their machine, where the addresses do not say
    otherwise; empty where none do."""
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


def _address_errors(launch: LaunchConfig) -> list[str]:
    def errors_of(field: str, text: str, *, is_own: bool = False) -> list[str]:
        return address_errors(
            field,
            text,
            keys=launch.keys,
            allow_plain_tcp=launch.allow_plain_tcp,
            is_own=is_own,
        )

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


def _chosen_host_errors(launch: LaunchConfig) -> list[str]:
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


def _thread_errors(
    config: RunConfig, hosts: Sequence[HostFacts], placement: Placement
) -> list[str]:
    generating, training = threads_on_hosts(config, placement)
    is_colocated = config.placement == "colocated"
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


def _memory_errors(
    config: RunConfig, policy: PolicyFacts, hosts: Sequence[HostFacts], placement: Placement
) -> list[str]:
    replicas, ranks = Counter(placement.replica_hosts), Counter(placement.trainer_hosts)
    errors = []
    for host, facts in enumerate(hosts):
        needed = replicas[host] * replica_bytes(config.generator, policy)
        needed += trainer_bytes(config, policy) * ranks[host] // config.trainer.world_size
        if replicas[host] or ranks[host]:
            needed += published_bytes(config, policy)
        errors += too_little_memory(
            config.generator, policy, needed, facts.memory_bytes, where=host_name(host)
        )
    return errors
