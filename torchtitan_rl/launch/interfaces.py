"""Chooses addresses and free ports on this machine, and checks whether something listens elsewhere.

By default torch's process groups listen on all interfaces, in plain text. `listen_privately`
restricts the addresses for every process group of the process, including vLLM's. It applies to the
TCP store on rank 0, where the ranks meet, and to the sockets of gloo and NCCL. Ranks on one host
then use its loopback interface; ranks on several hosts use the interface that reaches rank 0. The
store and gloo accept no connections of other users of the machine (`own_user`). Rank 0 listens on
its port as soon as it chooses the port (`take_port`), so that no other process can take the port.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import random
import socket
from pathlib import Path
from typing import Any

import psutil

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.own_user import accept_own_user

_CONNECT_S = 2.0


def listening_host(interface: str, towards: str) -> str:
    """The address on which this node should listen.

    Args:
        interface: an interface (``eth1``), an address or a host name of this node, or "". A host
            name is returned unchanged.
        towards: if ``interface`` is "", the address is the one that reaches this host.

    Raises:
        ConfigError: there is no such interface, or ``towards`` cannot be reached.
    """
    if not interface:
        try:
            return _address_towards(towards)
        except OSError as error:
            raise ConfigError(
                f"no way to {towards} ({error.strerror}): give an address of this node by "
                "--launch.interface"
            ) from error
    found = psutil.net_if_addrs()
    if interface in found:
        for family in (socket.AF_INET, socket.AF_INET6):
            for one in found[interface]:
                if one.family == family and "%" not in one.address:  # "%": a link-local address
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


def own_address() -> str:
    """The address of this machine's own name; the name if the address is on the loopback interface,
    as in Debian's /etc/hosts, or unknown."""
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, 0)[0][4][0])
        return name if ipaddress.ip_address(address).is_loopback else address
    except (OSError, ValueError):
        return name


def interface_towards(host: str) -> str:
    """The name of the interface that reaches ``host``, an IP address or a name; empty if
    unknown."""
    try:
        own = ipaddress.ip_address(_address_towards(host))
    except (OSError, ValueError):
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                held = ipaddress.ip_address(one.address)
                if held == own or (own.is_loopback and held.is_loopback):
                    return name
    return ""


def _address_towards(host: str) -> str:
    """The local address from which packets to ``host`` are sent. Sends no packet."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(address)
        return str(route.getsockname()[0])


def accepts(text: str) -> bool:
    """Whether something listens at an address. Blocks."""
    address = Address.parse(text)
    try:
        socket.create_connection((address.host, address.port), timeout=_CONNECT_S).close()
    except (OSError, UnicodeError):  # UnicodeError: an impossible host name
        return False
    return True


def close_connections(address: Address) -> None:
    """Close all connections of this process to ``address``. After a network cut, TCP itself notices
    that a connection is dead only when it sends again, up to two minutes later. Blocks."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    places = {place[:2] for *_, place in found}
    for one in psutil.Process().net_connections("tcp"):
        if tuple(one.raddr) not in places:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as copy:
            if copy.getsockname()[:2] == tuple(one.laddr):  # otherwise the number was reused
                copy.shutdown(socket.SHUT_RDWR)


def why_not_listen(address: Address) -> str:
    """The system's error when listening on ``address``; empty if that works."""
    try:
        family, kind, *_, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except OSError as error:
        return error.strerror or str(error)
    return ""


_LOWEST = 15_000
_DEFAULT_EPHEMERAL = 32_768
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """A free port below the ephemeral ports, which the system assigns by itself. So until the
    caller binds the port, only a process that asks for exactly this port could take it. Raises
    OSError if no port is free."""
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
    """The lowest port that the system assigns by itself, but at least `_LOWEST` + 1."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = _DEFAULT_EPHEMERAL
    return max(first, _LOWEST + 1)


_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_BACKLOG = 1024
_listeners: list[socket.socket] = []  # rank 0's listening socket, until its store takes it
_stores: list[Any] = []  # rank 0's store, which must live as long as the process


def take_port(host: str) -> int:
    """Listen on a free port of ``host`` for the store of this process, which is rank 0. Raises
    OSError if ``host`` is not an address of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    _listeners.append(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
    return int(_listeners[-1].getsockname()[1])


def listen_privately() -> None:
    """Restrict the addresses on which this process's process groups listen (see the module).

    Call this on each rank before a process group is created. If there are several ranks, torchrun's
    variables must be set, and rank 0 must have called `take_port`. Interfaces that are already set
    in the environment are kept.

    Raises:
        OSError: torch's library does not call `accept` as expected.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    interface = interface_towards(host)
    for name in _INTERFACES if interface else ():
        os.environ.setdefault(name, interface)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    gloo_and_stores = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    accept_own_user(str(gloo_and_stores), "accept", "accept4")
    if _listeners:
        import torch.distributed as dist

        listener = _listeners.pop()
        _stores.append(
            dist.TCPStore(  # type: ignore[attr-defined]
                host,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        )
