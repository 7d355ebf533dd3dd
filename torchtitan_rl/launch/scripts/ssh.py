"""A shell script that starts torchrun on each node over SSH."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.scripts.job import EXPORT, Job, continued, shell_path


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
    """Each node gets SIGHUP when its connection ends, which stops the run as SIGTERM does.

    Raises:
        ConfigError: the nodes are not as many as the hosts, or one is no host.
    """
    nodes: Sequence[str] = options.nodes
    if len(nodes) != job.num_hosts:
        raise ConfigError(
            f"--nodes has {len(nodes)} names and --hosts {job.num_hosts} hosts: give one name for "
            "each host"
        )
    for node in nodes:
        try:
            Address.parse(f"tls://[{node}]:1" if ":" in node else f"tls://{node}:1")
        except ConfigError as error:
            raise ConfigError(f"--nodes is {node!r}: {error}") from error
    launcher = job.torchrun(
        rank_0="$((rank == 0))",
        endpoint=shlex.quote(nodes[0]),
        host='"$node"',
        run_id='"$run"',
        keys=shell_path(job.keys) if job.keys else "",
    )
    before = [f"cd {shell_path(options.folder)}", *([options.setup] if options.setup else [])]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *job.header(
                "A script for SSH",
                "Run it where SSH reaches all nodes without a password. Ctrl-C stops the run with",
                "a checkpoint; the same script continues it. Code, policy and outputs are at the",
                "same paths on all nodes.",
            ),
            "set -euo pipefail",
            f"nodes=({shlex.join(nodes)})",
            'run="$(date +%s)-$$"',
            "",
            "# What each node runs; it is sent as text.",
            "start() {",
            "  local rank=$1 node=$2 run=$3",
            *(f"  {line}" for line in (*before, EXPORT)),
            *continued([f"exec {launcher[0]}", *launcher[1:]], "  "),
            "}",
            "",
            "connections=()",
            'for rank in "${!nodes[@]}"; do',
            '  call=$(printf "%q " start "$rank" "${nodes[rank]}" "$run")',
            '  text=$(printf "%s\\n" "set -e" "$(declare -f start)" "$call")',
            "  # -tt: with a terminal, the end of the connection reaches the node's processes.",
            "  # Any login shell gives the text, in base64, to bash.",
            '  ssh -tt -o BatchMode=yes "${nodes[rank]}" \\',
            '    "echo $(base64 <<<"$text" | tr -d "\\n") | base64 -d | bash" </dev/null &',
            "  connections+=($!)",
            "done",
            "",
            'stop() { kill -TERM "${connections[@]}" 2>/dev/null || true; }',
            "trap stop INT TERM HUP",
            "code=0",
            'for connection in "${connections[@]}"; do',
            "  while true; do",
            '    wait "$connection" && ended=0 || ended=$?',
            '    kill -0 "$connection" 2>/dev/null || break  # a trapped signal interrupts `wait`',
            "  done",
            "  if ((code == 0)); then code=$ended; fi",
            "done",
            'exit "$code"',
            "",
        ]
    )
