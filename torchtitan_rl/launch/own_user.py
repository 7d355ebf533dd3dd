"""Servers for processes of this user alone: `accept_own_user`.

Every user of a machine can connect to its loopback interface. What listens there in C or C++ and
asks for no key (gloo, torch's TCP stores, uvloop) gets only the connections that may be.

Invariant: of a connection that another user of this machine has opened no byte is read. Those from
other machines are not looked at.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
from pathlib import Path

import psutil

from torchtitan_rl.launch.c_functions import libc, replace_call

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # proc_net_tcp(5), of all users
_ESTABLISHED = "01"
_Size = ctypes.c_uint32


def accept_own_user(library: str, *names: str) -> None:
    """From now on this library, which calls the C functions ``names`` (``accept``, ``accept4``),
    gets no TCP connection of another user of this machine; each is closed at once.

    Raises:
        OSError: see `replace_call`.
    """
    for name in names:
        replace_call(library, name, _FUNCTIONS[name])


def is_allowed(connection: socket.socket) -> bool:
    """Whether its other end is a process of this user or on another machine; False where it has
    been closed."""
    try:
        peer = _ip(connection.getpeername()[0])
        if not (peer.is_loopback or peer in _own_ips()):
            return True
        own, other = _entry(connection.getsockname()), _entry(connection.getpeername())
        for table in _TABLES:
            for line in table.read_text().splitlines()[1:] if table.exists() else ():
                fields = line.split()
                if fields[1].endswith(other) and fields[2].endswith(own):
                    return fields[3] == _ESTABLISHED and int(fields[7]) == os.geteuid()
    except OSError:
        pass
    return False


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(text.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip


def _own_ips() -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    return {
        _ip(one.address)
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }


def _entry(address: tuple[str, int]) -> str:
    """As in the tables: words of four bytes, in the machine's order. Of a mapped address, which is
    in either table, the end that both have."""
    packed = _ip(address[0]).packed
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    number = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{number}:{address[1]:04X}"


def _accept4(listener: int, address: int | None, size: int | None, flags: int = 0) -> int:
    """accept4(2), until a connection is allowed."""
    room = _Size.from_address(size).value if size else 0
    while True:
        pointers = ctypes.c_void_p(address), ctypes.c_void_p(size)
        accepted = int(libc.accept4(listener, *pointers, flags))
        if accepted < 0:
            return accepted
        with socket.socket(fileno=accepted) as connection:
            if is_allowed(connection):
                return connection.detach()
        if size:
            _Size.from_address(size).value = room


_ACCEPT = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_FUNCTIONS = {
    "accept": ctypes.CFUNCTYPE(*_ACCEPT, use_errno=True)(_accept4),
    "accept4": ctypes.CFUNCTYPE(*_ACCEPT, ctypes.c_int, use_errno=True)(_accept4),
}
