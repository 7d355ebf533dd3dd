"""The address that the endpoint listens on, and the keys that protect it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtitan_rl.errors import EndpointLostError

API_KEY = "TORCHTITAN_RL_API_KEY"
ADMIN_KEY = "TORCHTITAN_RL_ADMIN_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of clients and administrators; empty where none is set. Never printed."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Keys:
        return cls(api=environment.get(API_KEY, ""), admin=environment.get(ADMIN_KEY, ""))

    def errors(self, host: str) -> list[str]:
        """Why these keys cannot protect an endpoint on ``host``; one message for each reason."""
        errors = []
        if not self.api and not is_loopback(host):
            errors.append(
                f"endpoint.host = {host!r} can be reached from other machines: set "
                f"{API_KEY}, or listen on 127.0.0.1"
            )
        errors += [
            f'{name} must not contain ":" (the session follows it) or blanks'
            for name, key in {API_KEY: self.api, ADMIN_KEY: self.admin}.items()
            if ":" in key or any(character.isspace() for character in key)
        ]
        if self.api and self.api == self.admin:
            errors.append(f"{ADMIN_KEY} must differ from {API_KEY}")
        return errors


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int, *, backlog: int = 1) -> socket.socket:
    """A listening socket on this address; port 0 takes a free one.

    It listens at once: two processes that have only bound a port with ``SO_REUSEADDR`` both
    succeed, and one of them fails much later.

    Raises:
        EndpointLostError: the address is taken, or is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    # A port whose last connections are in TIME_WAIT counts as free.
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
    """The address, as part of a URL, that reaches a server on ``host`` from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
