"""Configuration of the OpenAI-compatible endpoint: its options, its keys and its address."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchtitan_rl.errors import EndpointLostError

API_KEY = "TORCHTITAN_RL_API_KEY"
ADMIN_KEY = "TORCHTITAN_RL_ADMIN_KEY"

Constraints = Literal["free", "constrained", "refuse"]


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """The OpenAI-compatible HTTP endpoint, in a process of its own.

    Keys are never part of a configuration: clients need the environment variable
    ``TORCHTITAN_RL_API_KEY``, the admin routes ``TORCHTITAN_RL_ADMIN_KEY``.
    """

    enabled: bool = False
    """Start the endpoint in a training run. Agent tasks need it."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address but this machine's own needs an API key."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    model_name: str = "policy"
    """Name of the model that clients ask for."""
    tool_call_parser: str = ""
    """vLLM's name of a tool call parser, such as ``hermes``. Empty: tool calls stay text."""
    reasoning_parser: str = ""
    """vLLM's name of a reasoning parser. Empty: reasoning stays text."""
    constraints: Constraints = "free"
    """Requests that constrain the sampling (strict tools, a required tool, a schema, logit_bias,
    min_tokens, ...): with ``free`` the policy samples freely, so that every token can be trained
    on, and they are counted; ``constrained`` applies them, as vLLM does (the default of ``serve``);
    ``refuse`` answers 400."""
    chat_template: str = ""
    """File with a chat template. Empty: the tokenizer's own."""
    max_body_bytes: int = 4 << 20
    """Largest request body, in bytes."""
    max_n: int = 16
    """Largest number of completions of one request (``n`` times its prompts)."""
    max_tokens: int = 0
    """Longest completion, in tokens; 0 is as many as fit the context."""
    max_concurrent_requests: int = 256
    """Requests that run at once; others queue."""
    max_queued_requests: int = 1024
    """Requests that queue; others are refused with 429."""
    interval_s: float = 0.02
    """Seconds between two batches of messages between the controller and the endpoint."""
    stream_interval_s: float = 0.05
    """Seconds between two pieces of a streamed answer. Shorter ones have fewer tokens, and each
    costs CPU time."""
    session_timeout_s: float = 600.0
    """Seconds after which a session without a request or a reward is abandoned."""
    start_timeout_s: float = 300.0
    """Seconds that the endpoint's start may take."""
    threads: int = 1
    """OpenMP threads of the endpoint's process."""


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
