"""Where torch's process groups listen: torch's defaults are all interfaces, and plain text.

`listen_privately` restricts both what the ranks meet at (a TCP store on rank 0) and what gloo and
NCCL listen on, for every process group that the process creates, vLLM's own too: ranks on one host
use its loopback interface, ranks on several hosts the interface that reaches rank 0. The store and
gloo accept no other user of the machine (`own_user`). Rank 0 listens from the moment that its port
is known (`take_port`), so that no one else can be found there.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

from torchtitan_rl.launch.interfaces import interface_towards
from torchtitan_rl.launch.own_user import accept_own_user

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
