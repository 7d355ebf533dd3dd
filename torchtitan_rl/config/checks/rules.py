"""What a number of a configuration may be: a rule for each field of each configuration class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_rl import config as c
from torchtitan_rl.generation.validation import MAX_TEMPERATURE, MIN_TEMPERATURE

MAX_SECONDS = 1e7  # four months; beyond some centuries Python's own waits overflow
_MIN_SECONDS = 0.01  # some waits look that often, or ten times as often
_MAX_COUNT = 2**31 - 1
_MAX_FLOAT = 1e30  # float32 has 3e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A number from ``least`` to ``most``; ``above`` and ``below`` exclude the end itself."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False
    fix: str = ""  # instead of the bounds, in the message

    def error(self, value: float) -> str | None:
        """What to give instead, or None."""
        is_low = not (value > self.least if self.above else value >= self.least)
        is_high = not (value < self.most if self.below else value <= self.most)
        is_finite = isinstance(value, int) or math.isfinite(value)  # which large ints overflow
        if is_finite and not is_low and not is_high:
            return None
        if self.fix:
            return f"give {self.fix}"
        low = f"{'above' if self.above else 'at least'} {_text(self.least)}"
        if self.most == math.inf:
            return f"give a finite number, {low}"
        return f"give {low} and {'below' if self.below else 'at most'} {_text(self.most)}"


def _text(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else f"{bound}"


def _count(least: int = 0, most: int = _MAX_COUNT) -> Bounds:
    return Bounds(least=least, most=most)


_SECONDS = Bounds(least=_MIN_SECONDS, most=MAX_SECONDS)
_POSITIVE = Bounds(least=0.0, most=_MAX_FLOAT, above=True)
_SHARE = Bounds(least=0.0, most=1.0)
_RANKS = _count(1, 4096)
_THREADS = _count(1, 1024)
_TOKENS = _count(1, 1 << 24)
_BYTES = _count(1, 1 << 50)

RULES: Mapping[type, Mapping[str, Bounds]] = {
    c.SamplingConfig: {
        "temperature": Bounds(
            least=MIN_TEMPERATURE,
            most=MAX_TEMPERATURE,
            fix=f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE}; greedy siblings would be identical and "
            "train nothing",
        ),
        "top_p": Bounds(least=0.0, most=1.0, above=True),
        "top_k": _count(0),
        "min_p": Bounds(least=0.0, most=1.0, below=True),
        "max_tokens_per_turn": _TOKENS,
    },
    c.RolloutConfig: {
        "groups_per_step": _count(1, 1 << 16),
        "group_size": _count(2, 1 << 12),
        "max_turns": _count(1),
        "max_total_tokens": _count(2, 1 << 24),
        "step_timeout_s": _SECONDS,
        "rollout_timeout_s": _SECONDS,
        "turn_discount": _SHARE,
        "final_reward_weight": Bounds(least=0.0, most=_MAX_FLOAT),
    },
    c.OverlongConfig: {
        "buffer_tokens": _count(0, 1 << 24),
        "penalty": Bounds(least=0.0, most=_MAX_FLOAT),
    },
    c.GeneratorConfig: {
        "replicas": _RANKS,
        "tensor_parallel": _RANKS,
        "max_model_len": _count(2, 1 << 24),
        "max_running_requests": _count(1, 1 << 16),
        "max_kept_tokens": _count(1, 1 << 24),
        "kv_cache_bytes": _BYTES,
        "gpu_memory_utilization": Bounds(least=0.0, most=1.0, above=True),
        "max_steps_per_decision": _count(1, 1 << 12),
        "heartbeat_s": _SECONDS,
        "collective_timeout_s": _SECONDS,
        "request_timeout_s": _SECONDS,
        "stall_timeout_s": _SECONDS,
        "start_timeout_s": _SECONDS,
        "max_restarts": _count(0),
        "threads": _THREADS,
    },
    c.ScheduleConfig: {
        "staleness": Bounds(least=0, most=1024, fix="0 (synchronous) to 1024"),
        "window": Bounds(least=0.0),
        "max_resamples": _count(0),
        "max_empty_batches": _count(1),
        "report_wait_s": _SECONDS,
        "max_wait_s": _SECONDS,
    },
    c.WeightSyncConfig: {
        "fan_out": _count(0, 1 << 16),
        "lag_timeout_s": _SECONDS,
        "timeout_s": _SECONDS,
    },
    c.LossConfig: {
        "clip_low": Bounds(
            least=0.0,
            most=1.0,
            above=True,
            below=True,
            fix="a number between 0 and 1, for 1 - clip_low bounds a ratio from below",
        ),
        "clip_high": _POSITIVE,
        "importance_weight_cap": Bounds(
            least=1.0,
            most=_MAX_FLOAT,
            fix="a finite number of at least 1, which is the weight of a token that is on policy",
        ),
        "mask_low": Bounds(
            least=0.0,
            most=1.0,
            above=True,
            below=True,
            fix="a number between 0 and 1, for 1 is the ratio of a token that is on policy",
        ),
        "mask_high": Bounds(
            least=1.0,
            most=_MAX_FLOAT,
            above=True,
            fix="a finite number above 1, for 1 is the ratio of a token that is on policy",
        ),
        "constant_length": _count(0, 1 << 24),
        "kl_coefficient": Bounds(
            least=0.0, most=_MAX_FLOAT, fix="a finite number, 0 for no KL penalty"
        ),
        "max_log_ratio": Bounds(
            least=0.0,
            most=80.0,
            above=True,
            fix="a number above 0 and at most 80; float32 overflows at exp(88)",
        ),
    },
    c.OptimizerConfig: {
        "learning_rate": _POSITIVE,
        "betas": Bounds(least=0.0, most=1.0, below=True),
        "eps": Bounds(least=0.0, most=1.0, above=True),
        "weight_decay": Bounds(least=0.0, most=_MAX_FLOAT),
        "warmup_steps": _count(0),
        "decay_steps": _count(0),
        "min_lr_factor": _SHARE,
        "max_grad_norm": _POSITIVE,
    },
    c.TrainerConfig: {
        "data_parallel_replicate": _RANKS,
        "data_parallel_shard": _RANKS,
        "tensor_parallel": _RANKS,
        "row_len": _TOKENS,
        "rows_per_microbatch": _count(1, 1 << 16),
        "threads": _THREADS,
        "updates_per_batch": _count(1, 1 << 16),
        "step_timeout_s": _SECONDS,
    },
    c.EvaluationConfig: {
        "every": _count(0),
        "num_problems": _count(0, 1 << 20),
        "samples_per_problem": _count(1, 1 << 12),
        "temperature": Bounds(least=0.0, most=MAX_TEMPERATURE),  # and see `checks.run._sampling`
    },
    c.CheckpointConfig: {"every": _count(0), "keep": _count(1), "max_failures": _count(1)},
    c.MetricsConfig: {"rollouts_per_step": _count(0)},
    c.EndpointConfig: {
        "port": Bounds(least=0, most=65535, fix="0 (a free one) to 65535"),
        "max_body_bytes": _count(1024, 1 << 32),
        "max_n": _count(1, 1 << 12),
        "max_tokens": _count(0),
        "max_concurrent_requests": _count(1, 1 << 20),
        "max_queued_requests": _count(0),
        "interval_s": Bounds(least=0.001, most=60.0),
        "stream_interval_s": Bounds(least=0.001, most=60.0),
        "session_timeout_s": Bounds(least=1.0, most=MAX_SECONDS),
        "start_timeout_s": Bounds(least=1.0, most=MAX_SECONDS),
        "threads": _THREADS,
    },
    c.LaunchConfig: {
        "generator_hosts": _count(0, 1 << 16),
        "trainer_hosts": _count(0, 1 << 16),
        "port": _count(0, 65_000),
        "attach_timeout_s": Bounds(least=1.0, most=MAX_SECONDS),
    },
    c.RunConfig: {
        "seed": Bounds(least=0, most=2**32 - 1),
        "num_steps": _count(1),
    },
}
"""By configuration class and field: what a number may be."""
