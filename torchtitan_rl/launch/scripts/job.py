"""A run as a script starts it, whatever the script's language is."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

# What a YAML file may not have as it is, or takes as the end of a line.
_UNPRINTABLE = re.compile(
    "[^\t\n -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)


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

    def header(self, kind: str, *usage: str) -> list[str]:
        """The comment that a script begins with."""
        lines = [f"{kind} of a torchtitan-rl run on {self.hosts}, written by", f"  {self.command}"]
        plan = ["The plan (--dry-run prints all of it):", *(f"  {line}" for line in self.plan)]
        plain = [] if self.keys else _PLAIN
        lines = [*lines, *usage, *plain, *(plan if self.plan else ())]
        # An option may have line breaks, and characters that YAML forbids.
        parts = [part for line in lines for part in line.splitlines() or [""]]
        return [f"# {_UNPRINTABLE.sub(_escaped, part)}".rstrip() for part in parts]

    def with_outputs(self, folder: str) -> Job:
        """The same with its outputs there, where the options say nothing else."""
        if any(word.partition("=")[0] == "--output-dir" for word in self.options):
            return self
        return replace(self, options=("--output-dir", folder, *self.options))

    def run_options(self) -> tuple[str, ...]:
        """With those that let the same script continue what it began; without keys."""
        resume = () if "--checkpoint.resume" in self.options else ("--checkpoint.resume",)
        plain = ("--launch.allow-plain-tcp",) if self.allow_plain_tcp else ()
        return (*self.options, *resume, *plain)

    def torchrun(
        self, *, rank_0: str, endpoint: str, host: str, run_id: str, keys: str = ""
    ) -> list[str]:
        """The command of each host, a part of it in each line. The arguments are shell words:
        ``rank_0`` is 1 on the host of the endpoint and 0 elsewhere, ``host`` is this host's name,
        ``keys`` the folder of its keys, if any.
        """
        run = shlex.join(self.run_options())
        if keys:
            run += f" --launch.keys {keys}"
        return [
            f"torchrun --nnodes={self.num_hosts} --nproc-per-node=1",
            f"--rdzv-backend=c10d --rdzv-endpoint={endpoint}:{self.port} --rdzv-id={run_id}",
            f"--rdzv-conf=is_host={rank_0} --local-addr={host}",
            f"--max-restarts={self.max_restarts} --shutdown-timeout={self.grace_s - 20}",
            f"-m torchtitan_rl.launch {shlex.quote(self.config)}",
            f"{run} --launch.interface {host}",
        ]


_PLAIN = [
    "What the hosts send to each other is neither encrypted nor authenticated (allow-plain-tcp):",
    "for networks in which no one else is. `launch-script ... --keys DIR` encrypts it.",
]

# With torchrun's shared store, an agent that is started again does not find it.
EXPORT = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a node that is lost cannot come back"


def continued(lines: Sequence[str], indent: str) -> list[str]:
    """One shell command over several lines."""
    first, *rest = lines
    joined = [f"{indent}{first}", *(f"{indent}  {line}" for line in rest)]
    return [f"{line} \\" for line in joined[:-1]] + joined[-1:]


def shell_path(path: str) -> str:
    """A shell word; ``~`` is the home of whoever runs it."""
    if path == "~" or path.startswith("~/"):
        return f'"$HOME"{shlex.quote(path[1:]) if path[1:] else ""}'
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def text(value: object) -> str:
    """A YAML scalar or list on one line: JSON is YAML, but for some characters."""
    return _UNPRINTABLE.sub(_escaped, json.dumps(value, ensure_ascii=False))


def is_plain(value: str) -> bool:
    """Whether a YAML file may have these characters as they are."""
    return not _UNPRINTABLE.search(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"
