"""A port for processes that bind it themselves, a while after it was chosen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 15_000
_DEFAULT_EPHEMERAL = 32_768
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """A free port below those that the system gives to connections and to servers that ask for any:
    until its own process binds it, only one that asks for this very number could take it.

    Raises:
        OSError: there is none.
    """
    candidates = list(range(_LOWEST, first_ephemeral_port()))
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {_LOWEST} to {candidates[-1]} is free on {host}")


def first_ephemeral_port() -> int:
    """The lowest port that the system gives out by itself, and at least one above our own range."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = _DEFAULT_EPHEMERAL
    return max(first, _LOWEST + 1)
