"""Where torch's process groups listen: torch's defaults are all interfaces, and plain text.

`listen_privately` restricts both what the ranks meet at (a TCP store on rank 0) and what gloo and
NCCL listen on, for every process group that the process creates, vLLM's own too: ranks on one host
use its loopback interface, ranks on several hosts the interface that reaches rank 0.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_BACKLOG = 1024
_stores: list[Any] = []  # rank 0's, as long as its process runs


def listen_privately() -> None:
    """Call it on each rank, before a process group is created, with torchrun's variables set.
    Interfaces that the environment names already are kept.

    Raises:
        OSError: on rank 0, which cannot listen on MASTER_ADDR.
    """
    host = os.environ["MASTER_ADDR"]
    interface = interface_towards(host)
    for name in _INTERFACES if interface else ():
        os.environ.setdefault(name, interface)
    if os.environ["RANK"] == "0":
        _stores.append(_serve_store(host, int(os.environ["MASTER_PORT"])))
    # torch's name for a store that is there already: no rank starts one.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def interface_towards(host: str) -> str:
    """The name of the interface through which ``host``, an IP address or a name, is reached; empty
    where it is not known."""
    import psutil

    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(address)  # sends nothing
            own = ipaddress.ip_address(route.getsockname()[0])
    except (OSError, ValueError):
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                held = ipaddress.ip_address(one.address)
                if held == own or (own.is_loopback and held.is_loopback):
                    return name
    return ""


def _serve_store(host: str, port: int) -> Any:
    import torch.distributed as dist

    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
