"""Another user of the machine, who tries what the processes of a run listen on."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

USER_ID = 12345
_TIMEOUT_S = 10.0
_LISTENS = "00010000"  # __SO_ACCEPTCON in /proc/net/unix

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="NOT CHECKED: only root can act as another user of the machine"
)


def as_other_user(work: Callable[[], str]) -> str:
    """What ``work`` returns in a process of another user."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(USER_ID)
            os.setuid(USER_ID)
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def reach(family: int, address: Any, sent: bytes = b"\0" * 64) -> str:
    """What becomes of a connection: "refused" by the kernel, "closed" without an answer, or
    "open" where it is read, or only kept."""
    with socket.socket(family) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(address)
        except OSError:
            return "refused"
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        try:
            return "open" if connection.recv(1) else "closed"
        except ConnectionError:
            return "closed"
        except TimeoutError:
            return "open"


def listening_sockets(process: psutil.Process) -> list[tuple[int, Any]]:
    """Family and address of all that a process listens on; of UDP, what it is bound to."""
    with contextlib.suppress(psutil.Error, OSError):
        found: list[tuple[int, Any]] = [
            (one.family, tuple(one.laddr))
            for one in process.net_connections("inet")
            if one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
        ]
        held = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            _, _, _, flags, _, _, inode, *name = line.split(maxsplit=7)
            if flags == _LISTENS and f"socket:[{inode}]" in held:
                found.append((socket.AF_UNIX, name[0].replace("@", "\0", 1)))
        return found
    return []
