"""Scripts that start a run on several hosts, rendered from the files in ``templates``.

Scripts for Slurm, Kubernetes and SSH start torchrun on each host. A Compose file starts a worker in
each container, and the controller in a further one. All options of the run are passed to it
unchanged.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.addresses import Address

_WORD = re.compile(r"[^\W_-][\w.,:@+=-]*", re.ASCII)
_SLURM_TIME = re.compile(r"[0-9]+(-[0-9]+)?(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_SLURM_MEMORY = re.compile(r"[0-9]+[KMGT]?")
_POD_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_PROJECT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_COMPOSE_PORT = 26600
# Characters that YAML forbids or takes as the end of a line.
_UNPRINTABLE = re.compile(
    "[^\t\n -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The options of a run that all kinds of scripts need."""

    command: str
    """The command line that wrote the script."""
    config: str
    options: tuple[str, ...] = ()
    """Options of the run: the words after CONFIG."""
    name: str
    num_hosts: int
    devices: int
    """CUDA devices of each host."""
    cpus: int
    """Cores that a host needs at most."""
    weight_bytes: int | None
    """Memory of all versions of the weights on a host; None: unknown."""
    host_bytes: int = 0
    """Memory that the run needs on a host at most, the weights included; 0: unknown."""
    plan: tuple[str, ...] = ()
    """Lines that describe where each process runs."""
    keys: str = ""
    """The folder of ``torchtitan-rl keys``; empty: plain TCP."""
    allow_plain_tcp: bool = False
    """Add ``--launch.allow-plain-tcp`` to the options of the run."""
    max_restarts: int = 3
    port: int = 29500
    grace_s: int = 180
    """Seconds from SIGTERM to SIGKILL: for a step and its checkpoint."""

    @property
    def hosts(self) -> str:
        devices = _count(self.devices, "CUDA device") if self.devices else "no CUDA device"
        return f"{_count(self.num_hosts, 'host')} of {devices} each"

    @property
    def shared_memory(self) -> str:
        """A line about /dev/shm for the comment of a script."""
        room = "room in /dev/shm for all versions of the weights"
        if self.weight_bytes is None:
            return f"Each host needs {room}, at least three."
        return f"Each host needs {room}, {-(-self.weight_bytes // 2**20)} MiB."

    def shared_gib(self, least: int) -> int:
        """The size of a container's /dev/shm in GiB, with some room left."""
        return max(least, (self.weight_bytes or 0) // 2**30 + 2)

    @property
    def pods(self) -> list[str]:
        """The names of the pods, in the cluster's DNS and in certificates."""
        return [f"{self.name}-{index}.{self.name}" for index in range(self.num_hosts)]

    @property
    def run_options(self) -> tuple[str, ...]:
        """The options of the run, plus those with which the same script can also resume the run.
        The option for keys is not included."""
        resume = () if "--checkpoint.resume" in self.options else ("--checkpoint.resume",)
        plain = ("--launch.allow-plain-tcp",) if self.allow_plain_tcp else ()
        return (*self.options, *resume, *plain)

    def with_outputs(self, folder: str) -> Job:
        """The same job with its outputs in ``folder``, unless the options name another."""
        if any(word.partition("=")[0] == "--output-dir" for word in self.options):
            return self
        return replace(self, options=("--output-dir", folder, *self.options))


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What only Slurm needs."""

    folder: str = ""
    """Where the run starts, on storage that all nodes share. Empty: where ``sbatch`` is called."""
    setup: str = ""
    """A shell command before it, such as ``source .venv/bin/activate``."""
    partition: str = ""
    """Slurm's partition; empty: the cluster's default."""
    account: str = ""
    """Slurm's account; empty: the cluster's default."""
    time: str = "24:00:00"
    """Limit of the job, as Slurm takes it. Shortly before it ends, the run writes a checkpoint."""
    memory: str = ""
    """Memory of each node, such as ``512G``; empty: the cluster's default."""


def slurm_script(job: Job, options: SlurmOptions) -> str:
    """Render a batch script for ``sbatch``. Each job makes its own keys in a subfolder of
    ``job.keys``, because its nodes are not known before the job starts. Raises ConfigError if Slurm
    would not take an option."""
    words = {"name": job.name, "partition": options.partition, "account": options.account}
    for name, value in words.items():
        if value:
            _require(name, value, _WORD, "give one word of letters, digits and hyphens")
    if options.memory:
        _require("memory", options.memory, _SLURM_MEMORY, "give a number such as 512G")
    _require("time", options.time, _SLURM_TIME, "give HOURS:MINUTES:SECONDS or DAYS-HOURS")
    return _render("slurm.sh", job, options)


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """What only SSH needs."""

    nodes: tuple[str, ...] = ()
    """Names or addresses of the hosts, as SSH and the other hosts reach them."""
    folder: str = "."
    """Where the run starts on each node."""
    setup: str = ""
    """A shell command before it, such as ``source .venv/bin/activate``."""


def ssh_script(job: Job, options: SshOptions) -> str:
    """Render a shell script that starts torchrun on each node over SSH. Each node gets SIGHUP when
    its connection ends, which stops the run as SIGTERM does. Raises ConfigError if the numbers of
    nodes and hosts differ, or a node is not a host name."""
    if len(options.nodes) != job.num_hosts:
        raise ConfigError(
            f"--nodes has {len(options.nodes)} names and --hosts {job.num_hosts} hosts: give one "
            "name for each host"
        )
    for node in options.nodes:
        try:
            Address.parse(str(Address(scheme="tls", host=node, port=1)))
        except ConfigError as error:
            raise ConfigError(f"--nodes is {node!r}: {error}") from error
    return _render("ssh.sh", job, options)


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """What only Kubernetes needs."""

    image: str = "torchtitan-rl:latest"
    """An image with this package, such as Dockerfile makes, CONFIG and the policy."""
    storage: str = "outputs"
    """A PersistentVolumeClaim that all nodes can write (ReadWriteMany), mounted at /outputs."""
    memory: str = ""
    """Memory of each pod, its shared memory included. Empty: 48Gi more than the busiest host
    needs."""
    shared_memory: str = ""
    """Room for weights in /dev/shm, a part of the memory. Empty: for all versions, if the policy is
    on this machine or its published size is known, and at least 16Gi."""


def kubernetes_manifest(job: Job, options: KubernetesOptions) -> str:
    """Render a headless Service, which gives the pods names (``NAME-2.NAME``), and an indexed Job.
    Raises ConfigError if pods cannot have this name, or a size is not a quantity."""
    fix = "give at most 52 small letters, digits and hyphens, of which the first is a letter and "
    _require("name", job.name, _POD_NAME, f"{fix}the last not a hyphen")
    gib = job.shared_gib(16)
    options = replace(
        options,
        memory=options.memory or f"{max(gib, -(-job.host_bytes // 2**30)) + 48}Gi",
        shared_memory=options.shared_memory or f"{gib}Gi",
    )
    for name, size in (("memory", options.memory), ("shared-memory", options.shared_memory)):
        _require(name, size, _QUANTITY, "give a quantity such as 64Gi")
    return _render("kubernetes.yaml", job.with_outputs("/outputs"), options)


@dataclass(frozen=True, kw_only=True)
class ComposeOptions:
    """What only Docker needs."""

    image: str = "torchtitan-rl:latest"
    """An image with this package, such as Dockerfile makes, CONFIG and the policy."""
    outputs: str = "./outputs"
    """The folder of this machine that is mounted at /outputs."""
    shared_memory: str = ""
    """Room for weights in /dev/shm of each container. Empty: for all versions, if the policy is on
    this machine or its published size is known, and at least 8gb."""


def compose_file(job: Job, options: ComposeOptions) -> str:
    """Render a Compose file. Its containers share this machine's CUDA devices: the container of the
    first host has the first devices. Raises ConfigError if a project cannot have this name."""
    fix = "give small letters, digits, hyphens and underscores, of which the first is a letter or "
    _require("name", job.name, _PROJECT_NAME, f"{fix}a digit")
    job = job.with_outputs("/outputs")
    options = replace(options, shared_memory=options.shared_memory or f"{job.shared_gib(8)}gb")

    def address(host: str) -> str:
        return f"{'tls' if job.keys else 'tcp'}://{host}:{_COMPOSE_PORT}"

    hosts = [f"host{index}" for index in range(job.num_hosts)]
    keys = ["--keys", "/keys"] if job.keys else ["--allow-plain-tcp"]
    worker = ["torchtitan-rl", "worker", "--address"]
    controller = ["torchtitan-rl", "train", job.config, *job.run_options]
    controller += ["--launch.keys", "/keys"] if job.keys else []
    controller += ["--launch.attach", *map(address, hosts)]
    controller += ["--launch.address", address("controller")]
    workers = {host: [*worker, address(host), *keys] for host in hosts}
    return _render("compose.yaml", job, options, workers=workers, controller=controller)


def _require(option: str, value: str, form: re.Pattern[str], fix: str) -> None:
    if not form.fullmatch(value):
        raise ConfigError(f"--{option} is {value!r}: {fix}")


def _render(template: str, job: Job, options: object, **more: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # the filters below quote values for shell and YAML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "comment": _comment,
        "words": shlex.join,
        "path": _shell_path,
        "yaml": _yaml,
        "pod_argument": _pod_argument,
        # Compose replaces $NAME, and $$ by $; it takes a path without these starts as a volume.
        "compose": lambda value: _yaml(value).replace("$", "$$"),
        "relative": lambda path: path if path.startswith((".", "/", "~")) else f"./{path}",
    }
    return environment.get_template(f"{template}.j2").render(job=job, options=options, **more)


def _comment(text: str) -> str:
    """Make comment lines of a text that may have line breaks, or characters that YAML forbids."""
    lines = (f"# {_UNPRINTABLE.sub(_escaped, line)}".rstrip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines)


def _shell_path(path: str) -> str:
    """Quote a path as a shell word; a leading ``~`` is the home of the user who runs the script."""
    if path == "~" or path.startswith("~/"):
        return f'"$HOME"{shlex.quote(path[1:]) if path[1:] else ""}'
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _yaml(value: object) -> str:
    """Write a scalar or a list as YAML on one line: as JSON, with some characters escaped."""
    return _UNPRINTABLE.sub(_escaped, json.dumps(value, ensure_ascii=False))


def _pod_argument(command: str, indent: int) -> str:
    """Write an element of a YAML list, with ``$`` escaped: Kubernetes replaces ``$(NAME)``, and
    ``$$`` by ``$``."""
    command = re.sub(r"\$(?=[$(])", "$$", command)
    if _UNPRINTABLE.search(command):
        return _yaml(command)
    return "\n".join(["|", *(f"{' ' * indent}{line}" for line in command.split("\n"))])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"
