"""Configuration of sampling and of rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How completions are sampled. Training refuses truncated sampling (``top_p``, ``top_k``,
    ``min_p``): its logprobs would not be those of the policy that is trained."""

    temperature: float = 1.0
    """Divides the logits before sampling. Logprobs are those of the tempered distribution."""
    top_p: float = 1.0
    """Nucleus sampling; 1 keeps every token."""
    top_k: int = 0
    """Sample from the most likely ``top_k`` tokens; 0 keeps every token."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 keeps every token."""
    max_tokens_per_turn: int = 64
    """Longest completion of one turn, in tokens."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Groups, turns and limits of rollouts."""

    groups_per_step: int = 16
    """Problems that each optimizer step trains on (P)."""
    group_size: int = 8
    """Rollouts of each problem; advantages compare them with each other."""
    max_turns: int = 3
    """A rollout that needs more turns ends as ``max_turns``."""
    max_total_tokens: int = 512
    """Prompt and completions of a whole rollout, in tokens; at most ``generator.max_model_len``."""
    step_timeout_s: float = 60.0
    """Seconds for one call of the environment, or of an agent between two requests."""
    rollout_timeout_s: float = 3600.0
    """Seconds from reset to the last turn. It interrupts generation, but not a call of the
    environment, which is limited by ``step_timeout_s``."""
    advantage: Literal["mean", "std", "leave_one_out"] = "mean"
    """Reward minus the group's mean (Dr. GRPO), divided by its standard deviation as well (GRPO),
    or minus the mean of the other rollouts (RLOO)."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
