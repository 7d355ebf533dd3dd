"""Keeps other users of the machine away from this process's servers and temporary files.

`accept_own_user` closes connections of other users. Every user of a machine can connect to its
loopback interface. Some servers that listen there are written in C or C++ and ask for no key (gloo,
torch's TCP stores, uvloop). Invariant: no byte is read from a connection that another user of this
machine has opened. Connections from other machines are not checked.

`replace_call` redirects one loaded library's calls of a C function to another function. A shared
library calls functions of other libraries through its own global offset table, which the loader
fills in. A changed address in this table affects only the calls of this library. This works on
64-bit Linux only; it parses the ELF dynamic section described at
https://refspecs.linuxfoundation.org/elf/gabi4+/ch5.dynamic.html

`use_private_folder` makes a temporary folder that other users cannot enter. torch, vLLM and Monarch
put sockets, locks and caches into the temporary folder, some of them with names that can be guessed
and with the permissions of the umask. Other users could connect to these sockets, or create a link
with such a name first.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import mmap
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from torchtitan_rl.weights.shm_cleanup import FolderGuard

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # connections of all users, see proc(5)
_ESTABLISHED = 1
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1  # constants of Linux
_ALL_STATES = 0xFFFFFFFF
_ANY_COOKIE = b"\xff" * 8
_QUESTION = struct.Struct("=IHHII BBHI 4s 16s 16s I 8s")  # nlmsghdr, inet_diag_req_v2
_KIND = struct.Struct("=4xH")
_ERROR = struct.Struct("=16xi")  # nlmsgerr
_ANSWER = struct.Struct("=17xB62xI")  # state and user in nlmsghdr, inet_diag_msg
_Size = ctypes.c_uint32

libc: Any = ctypes.CDLL(None, use_errno=True)


def accept_own_user(library: str, *names: str) -> None:
    """From now on, close each TCP connection of another user of this machine before ``library`` can
    accept it. ``names`` are the C functions that the library calls (``accept``, ``accept4``).
    Raises OSError as `replace_call`."""
    for name in names:
        replace_call(library, name, _FUNCTIONS[name])


def is_allowed(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user, or on another machine. False if the
    connection has been closed. Unix sockets are not checked: they are in private folders."""
    if connection.family == socket.AF_UNIX:
        return True
    try:
        own, other = connection.getsockname(), connection.getpeername()
        peer = _ip(other[0])
        if not (peer.is_loopback or peer in _own_ips()):
            return True
        try:
            state, user = _ask_kernel(other, own)
        except OSError:  # a kernel without sock_diag(7), such as gVisor's
            state, user = _look_up(_entry(other), _entry(own))
        return (state, user) == (_ESTABLISHED, os.geteuid())
    except OSError:
        return False


def _ask_kernel(address: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[int, int]:
    """Ask sock_diag(7) for the state and the user of the socket with this address that is connected
    to ``other``, in a time that does not depend on the number of connections. Raises OSError."""
    ips = _ip(address[0]).packed, _ip(other[0]).packed
    family = socket.AF_INET if len(ips[0]) == 4 else socket.AF_INET6
    question = _QUESTION.pack(
        *(_QUESTION.size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0),
        *(family, socket.IPPROTO_TCP, 0, _ALL_STATES),
        *(struct.pack(">HH", address[1], other[1]), *ips, 0, _ANY_COOKIE),
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(question)
        answer = kernel.recv(4096)
    if _KIND.unpack_from(answer)[0] != _SOCK_DIAG_BY_FAMILY:
        raise OSError(-_ERROR.unpack_from(answer)[0], "sock_diag")
    state, user = _ANSWER.unpack_from(answer)
    return state, user


def _look_up(own: str, other: str) -> tuple[int, int]:
    """Like `_ask_kernel`, but searches the tables of all connections."""
    for table in _TABLES:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[1].endswith(own) and fields[2].endswith(other):
                return int(fields[3], 16), int(fields[7])
    raise OSError(errno.ENOENT, "no such connection")


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


def _entry(address: tuple[Any, ...]) -> str:
    """An address as it is written in the tables: words of four bytes, in the machine's byte order.
    An IPv4-mapped address may be in either table, so only its IPv4 part is returned: the entries of
    both tables end with this part."""
    packed = _ip(address[0]).packed
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    number = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{number}:{address[1]:04X}"


def _accept4(listener: int, address: int | None, size: int | None, flags: int = 0) -> int:
    """accept4(2), repeated until a connection is allowed. On a non-blocking socket, return EAGAIN
    after a connection that is not allowed: otherwise other users could keep the caller here."""
    room = _Size.from_address(size).value if size else 0
    while True:
        pointers = ctypes.c_void_p(address), ctypes.c_void_p(size)
        accepted = int(libc.accept4(listener, *pointers, flags))
        if accepted < 0:
            return accepted
        with socket.socket(fileno=accepted) as connection:
            if is_allowed(connection):
                return connection.detach()
        if not os.get_blocking(listener):
            ctypes.set_errno(errno.EAGAIN)
            return -1
        if size:
            _Size.from_address(size).value = room


_ACCEPT = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_FUNCTIONS = {
    "accept": ctypes.CFUNCTYPE(*_ACCEPT, use_errno=True)(_accept4),
    "accept4": ctypes.CFUNCTYPE(*_ACCEPT, ctypes.c_int, use_errno=True)(_accept4),
}


_END_TAG, _STRINGS, _SYMBOLS = 0, 5, 6  # tags of the dynamic section
_RELOCATIONS = ((7, 8), (23, 2))  # tags of two tables of relocations: address and size
_NUM_WITHOUT_SYMBOL = 0x6FFFFFF9  # how many relocations of the first table have no symbol
_SYMBOL_BYTES = _RELOCATION_BYTES = 24
_READ_WRITE = 3  # a protection for mprotect(2)
_Word = ctypes.c_size_t


def replace_call(library: str, name: str, function: Any) -> Callable[[], None]:
    """Redirect a library's calls of the C function ``name`` to ``function``, which was made with
    `ctypes.CFUNCTYPE`. Returns a function that undoes this. Raises OSError if the library does not
    exist or does not call ``name``, or its table cannot be written."""
    slots = list(_slots(ctypes.CDLL(library), name.encode()))
    if not slots:
        raise OSError(f"{library} does not call {name}")
    before = [slot.value for slot in slots]
    for slot in slots:
        page = ctypes.addressof(slot) & -mmap.PAGESIZE
        if libc.mprotect(ctypes.c_void_p(page), _Word(mmap.PAGESIZE), _READ_WRITE) != 0:
            raise OSError(ctypes.get_errno(), f"the calls of {library} cannot be replaced")
        slot.value = ctypes.cast(function, ctypes.c_void_p).value or 0
    _kept.append(function)  # native code may call it from now on, so it must not be freed

    def undo() -> None:
        for slot, address in zip(slots, before, strict=True):
            slot.value = address

    return undo


_kept: list[Any] = []


def _slots(library: ctypes.CDLL, name: bytes) -> Iterator[Any]:
    """The entries in a library's tables that have the address of the function ``name``."""
    base, _, section = (_Word * 3).from_address(library._handle)  # glibc's struct link_map
    dynamic = dict(_entries(section))
    for number, (table, size) in enumerate(_RELOCATIONS):
        relocations = range(0, dynamic.get(size, 0), _RELOCATION_BYTES)
        for place in relocations[0 if number else dynamic.get(_NUM_WITHOUT_SYMBOL, 0) :]:
            relocation = dynamic[table] + place
            offset, info = (_Word * 2).from_address(relocation)
            symbol = dynamic[_SYMBOLS] + _SYMBOL_BYTES * (info >> 32)
            name_offset = ctypes.c_uint32.from_address(symbol).value
            if name_offset and ctypes.string_at(dynamic[_STRINGS] + name_offset) == name:
                yield _Word.from_address(base + offset)


def _entries(section: int) -> Iterator[tuple[int, int]]:
    while True:
        tag, value = (_Word * 2).from_address(section)
        if tag == _END_TAG:
            return
        yield tag, value
        section += 2 * ctypes.sizeof(_Word)


_VARIABLE = "TORCHTITAN_RL_TMPDIR"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_MAX_ROOT = 40  # characters: a socket's path may have 107, and vLLM's names in the folder have 37


def use_private_folder() -> Path:
    """Use a private temporary folder in this process, and in processes that it starts from now on.
    The folder is removed when this process ends. No effect if the process inherited such a folder.

    torch's compiled code is kept in the user's cache instead, if the user has a home folder.
    """
    folder = os.environ.get(_VARIABLE, "")
    if not folder or folder != os.environ.get("TMPDIR"):
        root = tempfile.gettempdir()
        folder = tempfile.mkdtemp(
            prefix="torchtitan-rl-", dir=root if len(os.fsencode(root)) <= _MAX_ROOT else "/tmp"
        )
        FolderGuard([Path(folder)])
        os.environ["TMPDIR"] = os.environ[_VARIABLE] = tempfile.tempdir = folder
        with suppress(OSError, RuntimeError):  # a user without a home folder, as in containers
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            compiled = cache / "torchtitan-rl" / "torchinductor"
            compiled.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.environ.setdefault(_COMPILED, str(compiled))
    return Path(folder)
