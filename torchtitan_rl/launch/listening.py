"""Whether this process could listen at an address."""

from __future__ import annotations

import socket

from torchtitan_rl.launch.addresses import Address


def why_not_listen(address: Address) -> str:
    """What the system says against listening there; empty where nothing does."""
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
