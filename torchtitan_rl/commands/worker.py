"""``torchtitan-rl worker --address A``: makes this machine a host of runs, one after the other.

The worker serves the controllers that attach to its address (``--launch.attach A``) until it is
stopped. After SIGTERM, the notice of a machine that will soon be gone, it first waits until its run
has left this machine. Each run has its own *incarnation* of the worker, a process that serves this
run (`launch.workers`). When the incarnation ends, all processes that the run started here are
ended, even if its controller is gone.
"""

from __future__ import annotations

import contextlib
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
from torchtitan_rl.launch.workers import WorkerSupervisor, stopped_by_signals

_INCARNATION = "torchtitan_rl.backends.monarch.worker_loop"


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Make this machine a host of training runs, which attach to it with
    ``--launch.attach ADDRESS``. It serves one run after the other until it is stopped."""

    address: str
    """The only address on which the worker listens, such as ``tls://10.0.0.2:26600``. It is an
    address of this machine that the controller and the other hosts can reach."""
    keys: Path | None = None
    """This host's subfolder of what ``torchtitan-rl keys`` wrote; ``tls://`` needs it."""
    allow_plain_tcp: bool = False
    """Accept an address with ``tcp://``, too. Whoever reaches the port can then run programs here;
    on a loopback address, every user of this machine can."""


def main(words: Sequence[str]) -> int:
    """Returns 0 after SIGTERM if no run was cut off, else 128 + n after signal n."""
    options = parse_options(WorkerOptions, words, prog="torchtitan-rl worker")
    errors = address_errors(
        "--address",
        options.address,
        keys=options.keys,
        allow_plain_tcp=options.allow_plain_tcp,
        is_own=True,
    )
    if errors:
        raise ConfigError(errors)
    own = Address.parse(options.address)
    if why := why_not_listen(own):
        raise ConfigError(f"--address is '{own}': {why}")
    set_monarch_environment(options.keys, own, field="--keys")
    supervisor = WorkerSupervisor(incarnation_command(options.address), say=_say)
    with stopped_by_signals(supervisor) as received:
        code = supervisor.run()
    if received:
        _say(f"stopped by {signal.Signals(received[0]).name}")
        is_left = supervisor.was_left and received[0] == signal.SIGTERM
        return 0 if is_left else 128 + received[0]
    return code


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # go on even if stdout is closed
        print(f"worker: {line}", flush=True)


def incarnation_command(address: str) -> list[str]:
    """The command of the process of one incarnation, which listens at this address."""
    return [sys.executable, "-P", "-m", _INCARNATION, address]
