"""Where the endpoint listens, and with which keys: what can be wrong there before it starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtitan_rl.config import EndpointConfig
from torchtitan_rl.errors import ConfigError, EndpointLostError

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


def endpoint_mistakes(endpoint: EndpointConfig, keys: Keys) -> list[str]:
    """One message per mistake in address, files and keys (amounts: `validation_rules`). A port is
    tried out, and given back."""
    mistakes = [*_files(endpoint), *_parsers(endpoint)]
    if not 0 <= endpoint.port <= 65535:
        mistakes.append(f"endpoint.port is {endpoint.port}: give 0 (a free one) to 65535")
    else:
        try:
            listen(endpoint.host, endpoint.port).close()
        except EndpointLostError as error:
            return [*mistakes, str(error)]  # who may reach it is not known then
    return mistakes + _key_mistakes(endpoint.host, keys)


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


def _key_mistakes(host: str, keys: Keys) -> list[str]:
    from torchtitan_rl.serving.http_auth import check_keys

    try:
        check_keys(host=host, api_key=keys.api, admin_key=keys.admin)
    except ConfigError as error:
        return error.mistakes
    return []


def _parsers(endpoint: EndpointConfig) -> list[str]:
    from torchtitan_rl.adapters.vllm_parsers import parser_mistakes

    return parser_mistakes(endpoint)


def _files(endpoint: EndpointConfig) -> list[str]:
    mistakes = []
    if endpoint.chat_template:
        from torchtitan_rl.adapters.chat_template import template_mistake

        if mistake := template_mistake(endpoint.chat_template):
            mistakes.append(f"endpoint.chat_template is {endpoint.chat_template}: {mistake}")
    return mistakes
