"""Where the endpoint listens, and its keys."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtitan_rl.errors import EndpointLostError

API_KEY = "TORCHTITAN_RL_API_KEY"
ADMIN_KEY = "TORCHTITAN_RL_ADMIN_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Empty where there is none. They are shown nowhere."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Keys:
        return cls(api=environment.get(API_KEY, ""), admin=environment.get(ADMIN_KEY, ""))


def listen(host: str, port: int, *, backlog: int = 1) -> socket.socket:
    """A listening socket with this address; port 0 takes a free one.

    It listens at once: where two processes have only bound a port with ``SO_REUSEADDR``, both
    succeed, and one fails much later.

    Raises:
        EndpointLostError: the address is taken, or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    # A port whose last connections are still dying is free.
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
        taken.listen(backlog)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have that name
        taken.close()
        cause = getattr(error, "strerror", None) or error
        raise EndpointLostError(
            f"endpoint.host is {host} and endpoint.port {port}: {cause}; give another"
        ) from error
    return taken


def reachable(host: str) -> str:
    """An address, as part of a URL, that reaches what listens on ``host`` of this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
