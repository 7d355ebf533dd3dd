"""``torchtitan-rl worker --address A``: makes this machine a host of runs, one after the other.

It serves the controllers that attach to its address (``--launch.attach A``) until it is stopped.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torchtitan_rl.config.options import parse_options
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.addresses import Address, address_errors
from torchtitan_rl.launch.monarch_environment import set_monarch_environment

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Make this machine a host of training runs, which attach to it with
    ``--launch.attach ADDRESS``. It serves one run after the other until it is stopped."""

    address: str
    """Where to listen, and nowhere else: ``tls://10.0.0.2:26600``, an address of this machine that
    the controller and the other hosts can reach."""
    keys: Path | None = None
    """This host's folder of what ``torchtitan-rl keys`` wrote; ``tls://`` needs it."""
    allow_plain_tcp: bool = False
    """Also listen on ``tcp://`` outside of this machine: whoever reaches the port can run programs
    here. On loopback addresses it is always allowed."""


def main(words: Sequence[str]) -> int:
    """``torchtitan-rl worker OPTIONS``; returns the exit code, 128 + n after signal n.

    Raises:
        ConfigError: an option is wrong, or the address cannot be listened on.
    """
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
    set_monarch_environment(options.keys, own, field="--keys")
    from monarch.actor import start_worker_loop_forever  # seconds

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    lifetime = start_worker_loop_forever(address=options.address, ca="trust_all_connections")
    while not _is_listening(own):
        with suppress(TimeoutError):
            _wait(lifetime, options.address, _POLL_S)
    print(f"worker: listening on {options.address}", flush=True)
    _wait(lifetime, options.address)
    return 0


def _wait(lifetime: Any, address: str, timeout_s: float | None = None) -> None:
    try:
        lifetime.get(timeout=timeout_s)
    except ValueError as error:  # of the system, as text
        raise ConfigError(f"--address is {address!r}: {error}") from error


def _is_listening(own: Address) -> bool:
    try:
        socket.create_connection((own.host, own.port), timeout=_POLL_S).close()
    except OSError:
        return False
    return True


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """What Monarch started here ends with this process."""
    print(f"worker: stopped by {signal.Signals(number).name}", flush=True)
    os._exit(128 + number)
