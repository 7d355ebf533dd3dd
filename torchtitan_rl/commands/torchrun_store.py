"""torchrun's store, as a launcher waits in it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchtitan_rl.errors import ConfigError, DeadlineError
from torchtitan_rl.launch.addresses import ip_of
from torchtitan_rl.launch.node import Node

_T = TypeVar("_T")
POLL_S = 0.3
JOIN_S = 300.0  # for all launchers to meet, and then for all workers to listen
_CALL_S = 30.0


def connect(node: Node) -> TCPStore:
    """The store that torchrun's agents have, or else the launcher of rank 0.

    Raises:
        ConfigError: rank 0 cannot listen there.
    """
    listening = _listen(node.store_host, node.store_port) if node.provides_store else None
    store = TCPStore(
        node.store_host,
        node.store_port,
        is_master=node.provides_store,
        timeout=timedelta(seconds=JOIN_S),
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    store.set_timeout(timedelta(seconds=_CALL_S))
    return store


def _listen(host: str, port: int) -> int:
    """A socket on this address alone; TCPStore by itself would listen on all interfaces."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if (ip := ip_of(str(address[0]))) and ip.is_unspecified:
            raise OSError("that is every interface of the machine")
        return socket.create_server((host, port), family=family).detach()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"MASTER_ADDR is {host!r} and MASTER_PORT {port}: rank 0 cannot listen there "
            f"({error}); give an address of its machine and a free port"
        ) from error


async def poll(
    look: Callable[[], _T | None], what: Callable[[], str], *, within_s: float = JOIN_S
) -> _T:
    """What ``look`` finds, which runs in a thread.

    Raises:
        DeadlineError: nothing in ``within_s``; it says ``what`` was waited for.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while (found := await asyncio.to_thread(look)) is None:
        if loop.time() > deadline:
            raise DeadlineError(f"waited {within_s:.0f} s for {await asyncio.to_thread(what)}")
        await asyncio.sleep(POLL_S)
    return found
