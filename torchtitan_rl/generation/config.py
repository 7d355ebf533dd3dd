"""Configuration of the generator's replicas and of their engine loops."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_rl.generation.decision import KvPolicy


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One vLLM engine and the loop that steps it."""

    max_model_len: int = 512
    """Longest prompt plus completion, in tokens."""
    max_running_requests: int = 128
    """Requests that one replica decodes at once; the others wait in its queue."""
    kv_cache_bytes: int = 128 << 20
    """KV cache of each rank on a CPU, in bytes. On CUDA see ``gpu_memory_utilization``."""
    gpu_memory_utilization: float = 0.85
    """Share of a CUDA device's memory that an engine may use, weights included."""
    enable_prefix_caching: bool = True
    """Compute a prompt that several requests share once."""
    max_steps_per_decision: int = 4
    """Engine steps between two checks of the inbox. More steps cost fewer broadcasts between ranks;
    fewer steps admit new requests sooner."""
    collective_timeout_s: float = 1800.0
    """Seconds for one exchange between a replica's ranks."""
    threads: int = 1
    """OpenMP threads of each rank."""
    max_kept_tokens: int = 4096
    """Where ``top_p``, ``top_k`` or ``min_p`` cut tokens, the tokens that are left are recorded for
    the loss, at four bytes each. A token of a larger set (unless it cuts as few) is not trained on,
    and counted as ``truncated_sampling``. Raise it if that happens often."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig(EngineConfig):
    """The replicas that generate: how many, how large, and when one counts as lost."""

    replicas: int = 2
    """Number of replicas. Each holds the whole policy, on ``tensor_parallel`` ranks with an engine
    each."""
    tensor_parallel: int = 1
    """Ranks of each replica."""
    heartbeat_s: float = 60.0
    """Seconds after which an idle replica of several ranks exchanges an empty decision. Keep it
    well below ``collective_timeout_s``."""
    request_timeout_s: float | None = None
    """Seconds for one request, which is one turn. Default: ``rollout.rollout_timeout_s``, or an
    hour in ``serve``. Set it only where turns are much shorter than rollouts."""
    stall_timeout_s: float = 120.0
    """A replica with requests whose engine makes no progress for this time, in seconds, is lost."""
    max_restarts: int = 2
    """How often in a row a replica of a training run that is lost is started again; 0: never, as
    with ``placement colocated`` and in ``serve``. After 10 minutes of service the count begins
    again. Replicas of a host that is gone wait for it to come back."""
    start_timeout_s: float = 300.0
    """Seconds for a replica's start, loading the model included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """``heartbeat_s``: after so long an idle leader of several ranks sends an empty decision; keep
    it well below the time-out of the channel. ``version``: of the weights the engine starts with.
    Progress is reported every ``stream_interval_s`` to listeners that stream, and every
    ``progress_interval_s`` to others.
    """

    name: str = "replica"
    max_steps_per_decision: int = 4
    heartbeat_s: float = 60.0
    kv_policy: KvPolicy = field(default_factory=KvPolicy)
    version: int = 0
    stream_interval_s: float = 0.02
    progress_interval_s: float = 1.0
    stats_interval_s: float = 0.2  # between two readings of the engine's counters
