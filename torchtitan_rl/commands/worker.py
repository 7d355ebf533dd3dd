"""``torchtitan-rl worker --address A``: makes this machine a host of runs, one after the other.

The worker serves the controllers that attach to its address (``--launch.attach A``) until it is
stopped. Each run has its own *life* of the worker, a process that serves this run
(`launch.workers`). When the life ends, all processes that the run started here are ended, even if
its controller is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.addresses import Address, address_errors
from torchtitan_rl.launch.interfaces import why_not_listen
from torchtitan_rl.launch.monarch_environment import set_monarch_environment
from torchtitan_rl.launch.workers import (
    MEMORY_VARIABLE,
    NUM_LIFE_PORTS,
    WorkerSupervisor,
    stopped_by_signals,
)

_LIFE = "torchtitan_rl.backends.monarch.worker_loop"


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Make this machine a host of training runs, which attach to it with
    ``--launch.attach ADDRESS``. It serves one run after the other until it is stopped."""

    address: str
    """Where to listen, and nowhere else: ``tls://10.0.0.2:26600``, an address of this machine that
    the controller and the other hosts can reach. After the loss of a controller, or of the
    connection to it, the worker moves on to the next port."""
    ports: int = NUM_LIFE_PORTS
    """How many ports it may use, from the one of its address on; all must be open. A run that has
    lost this host as often cannot take it back."""
    keys: Path | None = None
    """This host's folder of what ``torchtitan-rl keys`` wrote; ``tls://`` needs it."""
    allow_plain_tcp: bool = False
    """Also listen on ``tcp://``: whoever reaches the port can run programs here; on a loopback
    address that is every user of this machine."""


def main(words: Sequence[str]) -> int:
    """``torchtitan-rl worker OPTIONS``; returns the exit code, 128 + n after signal n.

    Raises:
        ConfigError: an option is wrong, or the worker cannot listen on the address.
    """
    options = parse_options(WorkerOptions, words, prog="torchtitan-rl worker")
    errors = address_errors(
        "--address",
        options.address,
        keys=options.keys,
        allow_plain_tcp=options.allow_plain_tcp,
        is_own=True,
    )
    if options.ports < 1:
        errors.append(f"--ports is {options.ports}: give at least 1")
    if errors:
        raise ConfigError(errors)
    own = Address.parse(options.address)
    if why := why_not_listen(own):
        raise ConfigError(f"--address is '{own}': {why}")
    set_monarch_environment(options.keys, own, field="--keys")
    lives = WorkerSupervisor(
        life_command,
        options.address,
        memory=_memory(own),
        num_ports=options.ports,
        say=_say,
    )
    with stopped_by_signals(lives) as received:
        code = lives.run()
    if received:
        _say(f"stopped by {signal.Signals(received[0]).name}")
        return 128 + received[0]
    return code


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # go on even if stdout is closed
        print(f"worker: {line}", flush=True)


def life_command(address: str) -> list[str]:
    """The command of the process of one life, which listens at this address."""
    return [sys.executable, "-P", "-m", _LIFE, address]


def _memory(own: Address) -> Path:
    """The file for the port of the worker's next life. Its name has the worker's own address,
    because hosts may share a home folder."""
    if given := os.environ.get(MEMORY_VARIABLE):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "torchtitan-rl" / f"worker-{own.host.replace(':', '_')}-{own.port}"
