"""Configuration of the OpenAI-compatible endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
