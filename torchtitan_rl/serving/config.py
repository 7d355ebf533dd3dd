"""Configuration of the OpenAI-compatible endpoint: its options, its keys and its address, and the
checks that must pass before it starts."""

from __future__ import annotations

import ast
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from torchtitan_rl.bounds import Check, Count, LongSeconds, Name, OptionalName, Threads
from torchtitan_rl.errors import EndpointLostError

API_KEY = "TORCHTITAN_RL_API_KEY"
ADMIN_KEY = "TORCHTITAN_RL_ADMIN_KEY"

BACKLOG = 2048  # connections that wait to be accepted

Constraints = Literal["free", "constrained", "refuse"]


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """The OpenAI-compatible HTTP endpoint, in a process of its own.

    Keys are never part of a configuration: clients need the environment variable
    ``TORCHTITAN_RL_API_KEY``, the admin routes ``TORCHTITAN_RL_ADMIN_KEY``.
    """

    enabled: bool = False
    """Start the endpoint in a training run. Agent tasks need it."""
    host: Name = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs an API key."""
    port: Annotated[int, Check(lambda port: 0 <= port <= 65535, "give 0 (a free one) to 65535")] = 0
    """Port to listen on; 0 takes a free one."""
    model_name: Name = "policy"
    """Name of the model in clients' requests."""
    tool_call_parser: OptionalName = ""
    """vLLM's name of a tool call parser, such as ``hermes``. Empty: tool calls stay text."""
    reasoning_parser: OptionalName = ""
    """vLLM's name of a reasoning parser. Empty: reasoning stays text."""
    constraints: Constraints = "free"
    """What happens to requests that constrain sampling (strict or required tools, a schema,
    logit_bias, min_tokens, ...). ``free`` samples freely, so that every token can be trained on,
    and counts them; ``constrained`` applies the constraints, as vLLM does (the default of
    ``serve``); ``refuse`` answers 400."""
    chat_template: OptionalName = ""
    """File with a chat template. Empty: the tokenizer's own."""
    prompt_logprobs: bool = False
    """Serve ``prompt_logprobs`` (at most 20), which a teacher of other runs needs. On CUDA, a step
    of an engine is then limited to 2,048 tokens, because the logits of whole prompts take much
    memory."""
    max_body_bytes: Annotated[int, Interval(ge=1024, le=1 << 32)] = 4 << 20
    """Maximum size of a request body, in bytes."""
    max_n: Annotated[int, Interval(ge=1, le=1 << 12)] = 16
    """Maximum number of completions of one request (``n`` times the number of its prompts)."""
    max_tokens: Count = 0
    """Maximum length of a completion, in tokens; 0: whatever fits into the context."""
    max_concurrent_requests: Annotated[int, Interval(ge=1, le=1 << 20)] = 256
    """Maximum number of requests that run at the same time; others wait in a queue. A run's own
    rollouts do not wait."""
    max_queued_requests: Count = 1024
    """Maximum number of requests in the queue; others are refused with 429."""
    interval_s: Annotated[float, Interval(ge=0.001, le=60.0)] = 0.02
    """Seconds between two batches of messages between the controller and the endpoint. Shorter
    intervals reduce latency and take more CPU time."""
    stream_interval_s: Annotated[float, Interval(ge=0.001, le=60.0)] = 0.05
    """Seconds between two pieces of a streamed answer. Shorter intervals send fewer tokens at a
    time and take more CPU time."""
    session_timeout_s: LongSeconds = 600.0
    """Seconds without a request or reward after which a session counts as abandoned."""
    start_timeout_s: LongSeconds = 300.0
    """Deadline of the endpoint's start, in seconds."""
    max_restarts: Count = 2
    """Consecutive restarts of a lost endpoint; 0: the loss of the endpoint ends the run. The count
    starts again after 10 minutes of service."""
    threads: Threads = 1
    """OpenMP threads of the endpoint's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of clients and administrators; an unset key is empty. Keys are never printed."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Keys:
        return cls(api=environment.get(API_KEY, ""), admin=environment.get(ADMIN_KEY, ""))

    def errors(self, host: str) -> list[str]:
        """Return the reasons why these keys cannot protect an endpoint on ``host``, one each."""
        errors = []
        if not self.api and not is_loopback(host):
            fix = f"set {API_KEY}, or listen on 127.0.0.1"
            errors.append(f"endpoint.host = {host!r} can be reached from other machines: {fix}")
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


def listen(host: str, port: int, *, backlog: int = BACKLOG) -> socket.socket:
    """Open a listening socket on this address. Port 0 takes a free port.

    The socket listens at once: if two processes only bind the same port with ``SO_REUSEADDR``, both
    succeed, and one of them fails much later. Raises EndpointLostError: the address is taken, or is
    not an address of this machine.
    """
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=backlog, dualstack_ipv6=is_v6
        )
    except (OSError, ValueError) as error:  # ValueError: no host can have that name
        cause = str(getattr(error, "strerror", None) or error)
        cause = cause.partition(" (while attempting")[0]  # which repeats the address
        raise EndpointLostError(
            f"endpoint.host is {host} and endpoint.port {port}: {cause}; give another"
        ) from error


def reachable(host: str) -> str:
    """The address for URLs by which this machine reaches a server that listens on ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


_TABLES = {
    "tool_call_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}


def endpoint_errors(endpoint: EndpointConfig, keys: Keys) -> list[str]:
    """Return one message per error in the address and the keys. To check the port, this opens and
    closes it."""
    errors = []
    if endpoint.chat_template and (message := template_error(endpoint.chat_template)):
        errors.append(f"endpoint.chat_template is {endpoint.chat_template}: {message}")
    for option in _TABLES:
        name, known = getattr(endpoint, option), known_parsers(option)
        if name and known and name not in known:
            errors.append(f"endpoint.{option} is {name!r}: vLLM has {', '.join(sorted(known))}")
    try:
        listen(endpoint.host, endpoint.port).close()
    except EndpointLostError as error:
        return [*errors, str(error)]  # the keys cannot be checked for this address
    return errors + keys.errors(endpoint.host)


def template_error(path: str) -> str:
    """Describe the error in a template file in one line; empty if the template is valid."""
    # transformers compiles the template, because transformers adds tags to Jinja's own.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if not os.path.isfile(path):  # also False for names that no file can have
        return "there is no such file; give a Jinja template, or '' for the tokenizer's own"
    try:
        _compile_jinja_template(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        return f"it is not a chat template in Jinja: {error}"
    return ""


@cache
def known_parsers(field: str) -> frozenset[str]:
    """The names of vLLM's parsers, read from vLLM's source code, because importing vLLM takes
    seconds. The result is empty if the names are not found."""
    package, table = _TABLES[field]
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    source = Path(found.origin).parent / package / "__init__.py"
    try:
        statements = ast.parse(source.read_text()).body
    except (OSError, SyntaxError):
        return frozenset()
    for statement in statements:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Dict)
            and any(isinstance(name, ast.Name) and name.id == table for name in statement.targets)
        ):
            keys = statement.value.keys
            return frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))
    return frozenset()
