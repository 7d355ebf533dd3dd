"""The address that a node listens on: of the interface that is named, else of the one that leads to
the other nodes."""

from __future__ import annotations

import socket

import psutil

from torchtitan_rl.errors import ConfigError


def listening_host(interface: str, towards: str) -> str:
    """An address of this node, or the host name that ``interface`` is.

    Args:
        interface: an interface (``eth1``), an address or a host name of this node, or "".
        towards: a host that the address must lead to, where ``interface`` is "".

    Raises:
        ConfigError: there is no such interface, or no way to ``towards``.
    """
    if not interface:
        return _source_address(towards)
    found = psutil.net_if_addrs()
    if interface in found:
        for family in (socket.AF_INET, socket.AF_INET6):
            for one in found[interface]:
                if one.family == family and "%" not in one.address:  # link-local ones have a scope
                    return str(one.address)
        raise ConfigError(f"launch.interface is {interface!r}: that interface has no address")
    try:
        for family, kind, _, _, address in socket.getaddrinfo(
            interface, 0, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind) as probe:
                probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"launch.interface is {interface!r}: this node has no such interface or address "
            f"({error.strerror}); its interfaces are {', '.join(found)}"
        ) from error
    return interface


def _source_address(towards: str) -> str:
    """Where packets to ``towards`` leave this node; none is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no way to {towards} ({error.strerror}): give an address of this node by "
            "--launch.interface"
        ) from error
