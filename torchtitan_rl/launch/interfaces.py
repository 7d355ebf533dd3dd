"""Which of its addresses a machine uses, which ports are free there, and what listens elsewhere.

torch's process groups listen on all interfaces by default, and in plain text.
`listen_privately` restricts both what the ranks meet at (a TCP store on rank 0) and what gloo and
NCCL listen on, for every process group that the process creates, vLLM's own too: ranks on one host
use its loopback interface, ranks on several hosts the interface that reaches rank 0. The store and
gloo accept no other user of the machine (`own_user`). Rank 0 listens from the moment that its port
is known (`take_port`), so that no one else can be found there.
"""

from __future__ import annotations

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
    """An address of this node, or the host name that ``interface`` is.

    Args:
        interface: an interface (``eth1``), an address or a host name of this node, or "".
        towards: a host that the address must lead to, where ``interface`` is "".

    Raises:
        ConfigError: there is no such interface, or no way to ``towards``.
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


def interface_towards(host: str) -> str:
    """The name of the interface through which ``host``, an IP address or a name, is reached; empty
    if it is not known."""
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
    """Where packets to ``host`` leave this machine; none is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(address)
        return str(route.getsockname()[0])


def why_no_connection(address: Address, timeout_s: float = _CONNECT_S) -> Exception | None:
    """Why no connection can be made there now; None if something listens. Blocks."""
    try:
        socket.create_connection((address.host, address.port), timeout=timeout_s).close()
    except (OSError, UnicodeError) as error:  # of a name that cannot be one
        return error
    return None


def accepts(address: str) -> bool:
    """Whether something listens there. Blocks."""
    return why_no_connection(Address.parse(address)) is None


def why_not_listen(address: Address) -> str:
    """What the system says against listening there; empty if nothing does."""
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


_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_BACKLOG = 1024
_listeners: list[socket.socket] = []  # of rank 0, until its store takes it
_stores: list[Any] = []  # rank 0's, as long as its process runs


def take_port(host: str) -> int:
    """A free port of this address, on which the store of this process, rank 0, will listen.

    Raises:
        OSError: ``host`` is no address of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    _listeners.append(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
    return int(_listeners[-1].getsockname()[1])


def listen_privately() -> None:
    """Call it on each rank, before a process group is created. Where there are several ranks,
    torchrun's variables are set, and rank 0 has taken the port. Interfaces that the environment
    names already are kept.

    Raises:
        OSError: torch's library has changed.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    interface = interface_towards(host)
    for name in _INTERFACES if interface else ():
        os.environ.setdefault(name, interface)
    accept_own_user(_torch_library(), "accept", "accept4")
    if _listeners:
        _stores.append(_serve_store(host, _listeners.pop()))


def _torch_library() -> str:
    """What gloo and the TCP store are in."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "lib" / "libtorch_cpu.so")


def _serve_store(host: str, listener: socket.socket) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
