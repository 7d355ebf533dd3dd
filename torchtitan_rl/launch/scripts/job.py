"""A run as a script starts it, whatever the script's language is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchtitan_rl.config.hosts import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all kinds of scripts are made of."""

    command: str
    """The command line that wrote the script."""
    config: str
    options: tuple[str, ...] = ()
    """Of the run: what follows CONFIG."""
    name: str
    num_hosts: int
    devices: int
    """CUDA devices of each host."""
    cpus: int
    """Cores that a host needs at most."""
    plan: tuple[str, ...] = ()
    """Which process is where, as lines."""
    keys: str = ""
    """The folder of ``torchtitan-rl keys``; empty: plain TCP."""
    max_restarts: int = 3
    port: int = 29500
    grace_s: int = 180
    """Seconds from SIGTERM to SIGKILL: for a step and its checkpoint."""

    @property
    def hosts(self) -> str:
        devices = count(self.devices, "CUDA device") if self.devices else "no CUDA device"
        return f"{count(self.num_hosts, 'host')} of {devices} each"

    def header(self, kind: str, *usage: str) -> list[str]:
        """The comment that a script begins with."""
        lines = [f"{kind} of a torchtitan-rl run on {self.hosts}, written by", f"  {self.command}"]
        plan = ["The plan (--dry-run prints all of it):", *(f"  {line}" for line in self.plan)]
        plain = [] if self.keys else _PLAIN
        lines = [*lines, *usage, *plain, *(plan if self.plan else ())]
        # An option may have line breaks.
        return [f"# {part}".rstrip() for line in lines for part in line.splitlines() or [""]]

    def with_outputs(self, folder: str) -> Job:
        """The same with its outputs there, where the options say nothing else."""
        if any(word.partition("=")[0] == "--output-dir" for word in self.options):
            return self
        return replace(self, options=("--output-dir", folder, *self.options))

    def run_options(self) -> tuple[str, ...]:
        """With those that let the same script continue what it began; without keys."""
        resume = () if "--checkpoint.resume" in self.options else ("--checkpoint.resume",)
        return (*self.options, *resume)

    def key_options(self, prefix: str = "--") -> tuple[str, ...]:
        if self.keys:
            return (f"{prefix}keys", self.keys)
        plain = f"{prefix}allow-plain-tcp"
        return () if plain in self.options else (plain,)

    def torchrun(
        self, *, rank_0: str, endpoint: str, host: str, run_id: str, keys: str = ""
    ) -> list[str]:
        """The command of each host, a part of it in each line. The arguments are shell words:
        ``rank_0`` is 1 on the host of the endpoint and 0 elsewhere, ``host`` is this host's name,
        ``keys`` the folder of keys where it is not `Job.keys`.
        """
        own = f"--launch.keys {keys}" if keys else shlex.join(self.key_options("--launch."))
        run = " ".join(filter(None, (shlex.join(self.run_options()), own)))
        return [
            f"torchrun --nnodes={self.num_hosts} --nproc-per-node=1",
            f"--rdzv-backend=c10d --rdzv-endpoint={endpoint}:{self.port} --rdzv-id={run_id}",
            f"--rdzv-conf=is_host={rank_0} --local-addr={host}",
            f"--max-restarts={self.max_restarts} --shutdown-timeout={self.grace_s - 20}",
            f"-m torchtitan_rl.launch {shlex.quote(self.config)}",
            f"{run} --launch.interface {host}",
        ]


_PLAIN = [
    "Plain TCP: what the hosts send to each other is neither encrypted nor authenticated. Only for",
    "networks in which no one else is.",
]

# With torchrun's shared store, an agent that is started again does not find it.
EXPORT = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a node that is lost cannot come back"


def continued(lines: Sequence[str], indent: str) -> list[str]:
    """One shell command over several lines."""
    first, *rest = lines
    joined = [f"{indent}{first}", *(f"{indent}  {line}" for line in rest)]
    return [f"{line} \\" for line in joined[:-1]] + joined[-1:]


def shell_path(path: str) -> str:
    """A shell word; a ``~`` in front is the home of whoever runs it."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def text(value: object) -> str:
    """A YAML scalar or list on one line: JSON is YAML."""
    return json.dumps(value)
