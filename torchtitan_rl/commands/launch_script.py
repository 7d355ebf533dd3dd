"""``torchtitan-rl launch-script KIND CONFIG --hosts 4x8 [options] [-- options of the run]``: prints
a file that starts a run on several hosts: a Slurm script, a Kubernetes manifest, a script for SSH,
or a Compose file.

Exit codes: 0 the file was printed; 2 the run does not fit the hosts, or an option is wrong.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import tyro

from torchtitan_rl.bounds import check_fields
from torchtitan_rl.config.hosts import launch_errors
from torchtitan_rl.config.loader import load_config, parse_options, split_config
from torchtitan_rl.config.machine import NoRoomError, host_name, made_up_hosts
from torchtitan_rl.config.memory import version_bytes
from torchtitan_rl.config.model import PolicyFacts, find_policy, is_elsewhere
from torchtitan_rl.config.plan import ProcessPlan, plan_on_hosts
from torchtitan_rl.config.published import published_facts
from torchtitan_rl.config.room import needed_bytes
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.scripts import (
    ComposeOptions,
    Job,
    KubernetesOptions,
    SlurmOptions,
    SshOptions,
    compose_file,
    kubernetes_manifest,
    slurm_script,
    ssh_script,
)

_T = TypeVar("_T")
_KINDS: dict[str, tuple[type[Any], Callable[[Job, Any], str]]] = {
    "slurm": (SlurmOptions, slurm_script),
    "kubernetes": (KubernetesOptions, kubernetes_manifest),
    "ssh": (SshOptions, ssh_script),
    "docker-compose": (ComposeOptions, compose_file),
}
HELP = f"""\
usage: torchtitan-rl launch-script KIND CONFIG --hosts 4x8 --keys DIR [options]
                                   [-- options of the run]
       torchtitan-rl launch-script KIND --help
KIND is one of {", ".join(_KINDS)}.
"""
_CONTROLLER_CPUS = 2
_DEVICE_CPUS = 8  # for each CUDA device: its process, its compilers, and what feeds it
_NOT_NAME = re.compile(r"[^a-z0-9-]+")
_BOUNDS = {"cpus": (0, 4096), "max_restarts": (0, 10_000), "port": (1, 65535)}
_OF_THE_SCRIPT = {
    "attach": "leave it out",
    "job": "leave it out",
    "address": "leave it out",
    "interface": "leave it out",
    "hosts": "give --hosts",
    "keys": "give --keys",
}


@dataclass(frozen=True, kw_only=True)
class LaunchScriptOptions:
    """What every kind of script needs."""

    hosts: str
    """Number of hosts, and of CUDA devices on each: ``4x8``, or ``4x0`` for hosts that compute on
    their CPU."""
    name: str = ""
    """Name of the job. Empty: the file name of CONFIG."""
    keys: str = ""
    """Folder that ``torchtitan-rl keys`` wrote. If it is given, the hosts use TLS."""
    allow_plain_tcp: bool = False
    """Allow traffic that is neither encrypted nor authenticated, for networks in which no one else
    is. Without keys, this is all traffic between the hosts. With keys, it is only the traffic
    between trainer ranks on several hosts, which TLS does not cover."""
    cpus: int = 0
    """Cores of each host. 0: two more than the plan has threads on the busiest host, and at least 8
    for each CUDA device."""
    max_restarts: int = 3
    """How often torchrun starts the run again after a failure."""
    port: int = 29500
    """Port on the first node, at which torchrun's nodes meet."""


@dataclass(frozen=True, kw_only=True)
class _Options(Generic[_T]):
    """Print a file that starts a run on several hosts."""

    common: tyro.conf.OmitArgPrefixes[LaunchScriptOptions]
    own: tyro.conf.OmitArgPrefixes[_T]


def main(words: Sequence[str]) -> int:
    for word in words:
        if any("\ud800" <= one <= "\udfff" for one in word):
            raise ConfigError(f"{word!r}: it is not UTF-8 text")
    own = list(words)
    run_options: list[str] = []
    if "--" in own:
        place = own.index("--")
        own, run_options = own[:place], own[place + 1 :]
    if not own or own[0] not in _KINDS:
        given = f"is {own[0]}" if own else "is missing"
        raise ConfigError(f"KIND {given}: give one of {', '.join(_KINDS)}")
    kind, *rest = own
    if {"-h", "--help"} & set(rest):
        _script(kind, Path("CONFIG"), ["--help"], [], command="")
    config, rest = split_config(rest, prog=f"torchtitan-rl launch-script {kind}")
    command = shlex.join(["torchtitan-rl", "launch-script", *words])
    print(_script(kind, config, rest, run_options, command=command), end="")
    return 0


def _script(
    kind: str, config: Path, words: list[str], run_options: list[str], *, command: str
) -> str:
    own, render = _KINDS[kind]
    options: type[_Options[Any]] = _Options[own]  # type: ignore[valid-type]
    try:
        found = parse_options(options, words, prog=f"torchtitan-rl launch-script {kind} CONFIG")
    except ConfigError as error:
        if not str(error).startswith("Unrecognized"):
            raise
        raise ConfigError(f"{error}; options of the run follow --") from error
    return render(_job(config, found.common, run_options, command), found.own)


def _job(config: Path, common: LaunchScriptOptions, run_options: list[str], command: str) -> Job:
    run = load_config(config, run_options)
    _check(run, common)
    try:
        plan = plan_on_hosts(run, made_up_hosts(common.hosts))
    except NoRoomError as error:
        raise ConfigError(str(error)) from error
    may_be_plain = common.allow_plain_tcp or run.launch.allow_plain_tcp
    _check_encryption(plan, common, may_be_plain=may_be_plain)
    devices = len(plan.hosts[0].cuda_devices)
    policy = _policy(run.policy.checkpoint)
    weight_bytes: int | None = None
    if policy is not None:
        dtype = run.policy.dtype if plan.device == "cuda" else "float32"
        weight_bytes = run.num_published_versions * version_bytes(run, policy, dtype)
    return Job(
        command=command,
        config=str(config),
        options=tuple(run_options),
        name=common.name or _NOT_NAME.sub("-", config.stem.lower()).strip("-") or "run",
        num_hosts=len(plan.hosts),
        devices=devices,
        cpus=common.cpus or max(_num_threads(plan) + _CONTROLLER_CPUS, _DEVICE_CPUS * devices),
        weight_bytes=weight_bytes,
        host_bytes=0 if policy is None else _host_bytes(run, policy, plan),
        plan=tuple(plan.describe().splitlines()),
        keys=common.keys,
        allow_plain_tcp=may_be_plain and not run.launch.allow_plain_tcp,
        max_restarts=common.max_restarts,
        port=common.port,
    )


def _check(run: RunConfig, common: LaunchScriptOptions) -> None:
    for name, (least, most) in _BOUNDS.items():
        if not least <= (value := getattr(common, name)) <= most:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: give {least} to {most}")
    try:
        made_up_hosts(common.hosts)
    except ValueError as error:
        raise ConfigError(f"--hosts is {common.hosts!r}: {error}") from error
    for name, fix in _OF_THE_SCRIPT.items():
        if value := getattr(run.launch, name):
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise ConfigError(f"launch.{name} is {shown}: the script has its own; {fix}")
    on_hosts = replace(run, launch=replace(run.launch, hosts=common.hosts))
    check_fields(run)
    if errors := launch_errors(on_hosts):
        raise ConfigError(errors)


def _check_encryption(
    plan: ProcessPlan, common: LaunchScriptOptions, *, may_be_plain: bool
) -> None:
    if not common.keys and not may_be_plain:
        raise ConfigError(
            "--keys: give a folder of `torchtitan-rl keys`, or, where no one else is in the "
            "network, --allow-plain-tcp"
        )
    spanned = sorted({part.host for part in plan.trainer.on_each_host()} if plan.trainer else ())
    if len(spanned) > 1 and not may_be_plain:
        raise ConfigError(
            f"--allow-plain-tcp: trainer ranks on {', '.join(map(host_name, spanned))} would "
            "exchange gradients, which gloo and NCCL do not encrypt; keep the trainer on one host "
            "(launch.trainer_hosts), or, where no one else is in the network, give it"
        )


def _policy(checkpoint: str) -> PolicyFacts | None:
    """The facts about the policy; None if it is not on this machine, and no published model whose
    sizes are known. Nothing is downloaded for this."""
    if is_elsewhere(checkpoint):
        return published_facts(checkpoint)
    try:
        return find_policy(checkpoint)[1]
    except ConfigError:
        return None


def _host_bytes(run: RunConfig, policy: PolicyFacts, plan: ProcessPlan) -> int:
    replicas = Counter(part.host for group in plan.replicas for part in group.on_each_host())
    trainer = plan.trainer.on_each_host() if plan.trainer else ()
    ranks = {part.host: part.ranks for part in trainer}
    return max(
        needed_bytes(
            run,
            policy,
            replicas=replicas[host],
            trainer_ranks=ranks.get(host, 0),
            device=plan.device,
        )
        for host in range(len(plan.hosts))
    )


def _num_threads(plan: ProcessPlan) -> int:
    """The number of threads on the host with the most threads."""
    threads = Counter[int]()
    groups = [*plan.replicas, *([plan.trainer] if plan.trainer else [])]
    for part in (part for group in groups for part in group.on_each_host()):
        threads[part.host] += part.ranks * part.threads
    return max(threads.values())
