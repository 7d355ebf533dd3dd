"""Configuration of the generator's replicas and of their engine loops."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from tyro.constructors import PrimitiveConstructorSpec

from torchtitan_rl.bounds import (
    Check,
    Count,
    OptionalName,
    PositiveShare,
    Ranks,
    Seconds,
    Threads,
    Tokens,
    without_login,
)
from torchtitan_rl.generation.decision import KvPolicy


def _parse_options(words: list[str]) -> dict[str, Any]:
    """Parse words such as ``enforce_eager=true``; a value that is not JSON is a text."""
    options: dict[str, Any] = {}
    for word in words:
        name, is_pair, value = word.partition("=")
        if not is_pair:
            raise ValueError(f"{word!r}: give NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except (ValueError, RecursionError):
            options[name] = value
    return options


def shown_options(options: Mapping[str, Any]) -> list[str]:
    """The words that `_parse_options` reads."""
    return [f"{name}={json.dumps(value)}" for name, value in options.items()]


def _is_json(options: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(options, allow_nan=False)) == options)
    except (TypeError, ValueError, RecursionError):
        return False


VllmOptions = Annotated[
    dict[str, Any],
    Check(_is_json, "give values of JSON types, and finite numbers"),
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME=VALUE ...]",
        instance_from_str=_parse_options,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=shown_options,
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One vLLM engine and the loop that steps it."""

    max_model_len: Annotated[int, Interval(ge=2, le=1 << 24)] = 512
    """Maximum length of a prompt and its completion together, in tokens. Raise it for longer
    rollouts; each running request may take that much of the KV cache."""
    max_running_requests: Annotated[int, Interval(ge=1, le=1 << 16)] | None = None
    """Maximum number of requests that one replica decodes at once; the others wait in its queue.
    By default 128 on a CPU and 256 on CUDA. Lower it if requests are preempted because the KV cache
    is full, although none starts unless 5 % of the cache stay free."""
    kv_cache_bytes: Annotated[int, Interval(ge=1, le=1 << 50)] = 128 << 20
    """Size of the KV cache of each rank on a CPU, in bytes. CUDA replicas use
    ``gpu_memory_utilization`` instead."""
    gpu_memory_utilization: PositiveShare = 0.85
    """Share of a CUDA device's memory that an engine may use, weights included. Lower it if the
    device runs out of memory."""
    enable_prefix_caching: bool = True
    """Compute a prompt prefix that several requests share only once."""
    max_steps_per_decision: Annotated[int, Interval(ge=1, le=1 << 12)] = 4
    """Engine steps between two checks for new requests. More steps need fewer broadcasts between
    ranks; fewer steps admit new requests sooner."""
    collective_timeout_s: Seconds = 1800.0
    """Deadline of one exchange between a replica's ranks, in seconds."""
    threads: Threads = 1
    """OpenMP threads of each rank."""
    max_recorded_candidates: Tokens = 4096
    """Largest set of candidate tokens that is recorded for the loss, at four bytes each, where
    ``top_p``, ``top_k`` or ``min_p`` exclude tokens. A token sampled from a larger set is not
    trained on and counts as ``truncated_sampling``; raise the limit if that happens often."""
    vllm: VllmOptions = field(default_factory=dict)
    """Further fields of vLLM's ``EngineArgs``, such as ``enforce_eager=true``,
    ``attention_backend=FLASH_ATTN`` or ``speculative_config={"method": "ngram", ...}``. Values are
    JSON, or else text. Fields that this program sets itself are refused."""
    batch_invariant: bool = False
    """Compute each request independently of the others in its batch, bit for bit
    (``VLLM_BATCH_INVARIANT``). Slower, and only on CUDA."""

    def running_requests(self, device: Literal["cpu", "cuda"]) -> int:
        return self.max_running_requests or {"cpu": 128, "cuda": 256}[device]

    def step_tokens(self, device: Literal["cpu", "cuda"]) -> int:
        """Return the largest number of tokens in one step of an engine. Only CUDA engines split
        prompts into chunks, so elsewhere a step has room for the longest prompt."""
        return 16384 if device == "cuda" else max(4096, self.max_model_len)


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig(EngineConfig):
    """The replicas that generate: how many, how large, and when one counts as lost."""

    replicas: Ranks = 2
    """Number of replicas, each of which holds the whole policy. Add replicas if the trainer waits
    for rollouts."""
    endpoint: Annotated[
        OptionalName, without_login("export the key as TORCHTITAN_RL_GENERATOR_KEY")
    ] = ""
    """URL of a ``torchtitan-rl serve --tenants`` whose engines generate, such as
    ``http://host:8000/v1``, in place of replicas of this run (``replicas`` is then 1). Several runs
    with adapters (``policy.lora``) share them. The server's key is read from the environment
    variable ``TORCHTITAN_RL_GENERATOR_KEY``."""
    tensor_parallel: Ranks = 1
    """Number of ranks (CUDA devices or CPU processes) that each replica's weights are split over.
    Raise it for a policy that does not fit on one device."""
    heartbeat_s: Seconds = 60.0
    """Seconds after which the ranks of an idle replica exchange an empty message, so that their
    connections do not time out. At most half of ``collective_timeout_s``."""
    request_timeout_s: Seconds | None = None
    """Deadline of one request (one turn), in seconds. By default that of a rollout,
    ``rollout.rollout_timeout_s``, or an hour in ``serve``. Set it where turns are much shorter
    than rollouts."""
    stall_timeout_s: Seconds = 120.0
    """Seconds without progress after which a replica that has requests counts as lost. Raise it if
    single engine steps take that long."""
    max_restarts: Count = 2
    """Consecutive restarts of a lost replica; 0 disables restarts. The count starts again after 10
    minutes of service. Replicas of a lost host wait until it is back. Has no effect in ``serve
    --tenants``, where no replica is restarted."""
    start_timeout_s: Seconds | None = None
    """Deadline of a replica's start, in seconds; by default 300, and 900 on CUDA, where vLLM
    compiles. Raise it for models that load slowly."""

    @property
    def num_local(self) -> int:
        """The number of replicas that this program starts."""
        return 0 if self.endpoint else self.replicas

    @property
    def num_ranks(self) -> int:
        return self.num_local * self.tensor_parallel

    @property
    def num_threads(self) -> int:
        return self.num_ranks * self.threads


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Configuration of one engine loop, whose engine begins with the weights of ``version``.

    ``heartbeat_s``: after this idle time the leader of several ranks sends an empty decision; keep
    it well below the channel's time-out. Progress is reported every ``stream_interval_s`` for
    requests that stream, and every ``progress_interval_s`` for others.
    """

    name: str = "replica"
    max_steps_per_decision: int = 4
    heartbeat_s: float = 60.0
    kv_policy: KvPolicy = field(default_factory=KvPolicy)
    version: int = 0
    stream_interval_s: float = 0.02
    progress_interval_s: float = 1.0
    stats_interval_s: float = 0.2  # between two readings of the engine's counters
