"""Configuration of sampling and of rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How completions are sampled.

    Where ``top_p``, ``top_k`` or ``min_p`` cut tokens, the loss compares distributions over the
    tokens that were left: see `training/losses/policy.py`. Evaluation cuts none.
    """

    temperature: float = 1.0
    """Divides the logits before sampling; logprobs are those of the tempered distribution. Lower it
    for less random rollouts."""
    top_p: float = 1.0
    """Nucleus sampling; 1 keeps every token."""
    top_k: int = 0
    """Sample from the most likely ``top_k`` tokens; 0 keeps every token."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 keeps every token."""
    max_tokens_per_turn: int = 64
    """Longest completion of one turn, in tokens. Raise it if many are cut (``length``)."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """What training does about completions near or at ``max_tokens_per_turn``. Rewards that are
    reported, and those of evaluations, are without it."""

    buffer_tokens: int = 0
    """Over so many tokens before the limit the reward falls in proportion; 0 leaves it as it is."""
    penalty: float = 1.0
    """What the reward has lost at the limit."""
    mask: bool = False
    """Leave rollouts with a completion that was cut out of the loss; their rewards still count in
    the group's baseline."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Groups, turns and limits of rollouts."""

    groups_per_step: int = 16
    """Problems that each optimizer step trains on (P). More give a less noisy gradient."""
    group_size: int = 8
    """Rollouts of each problem, at least 2; advantages compare them with each other. Raise it if
    the rewards of many groups are all equal."""
    max_turns: int = 3
    """Completions of one rollout; one that needs more ends with the status ``max_turns``."""
    max_total_tokens: int = 512
    """Prompt and completions of a whole rollout, in tokens, at most ``generator.max_model_len``. A
    rollout without room for another turn ends with the status ``max_tokens``."""
    step_timeout_s: float = 60.0
    """Seconds for one call of the environment, or for an agent between two requests."""
    rollout_timeout_s: float = 3600.0
    """Seconds from reset to the last turn, without pauses. It interrupts generation, but no call of
    the environment, which has ``step_timeout_s``. A rollout that reaches it is not trained on."""
    advantage: str = "mean"
    """``mean``: reward minus the group's mean (Dr. GRPO); ``std``: that divided by the group's
    standard deviation (GRPO); ``leave_one_out``: reward minus the mean of the others (RLOO); or a
    function of your own, ``package.module:function`` or ``path/file.py:function``."""
    credit: Literal["outcome", "turn"] = "outcome"
    """What a turn is trained on: the ``outcome`` of its rollout, or its own ``turn_reward`` with
    what comes after it, compared with the siblings' at the same turn."""
    turn_discount: float = 1.0
    """With ``credit`` ``turn``: weight of what the next turn earns, 0 to 1."""
    final_reward_weight: float = 1.0
    """With ``credit`` ``turn``: weight of the rollout's reward, which counts after the last turn. 0
    where the rewards of the turns are all there is, as in games."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
