"""Configuration of sampling and of rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from torchtitan_rl.bounds import (
    Check,
    Count,
    Name,
    Positive,
    PositiveShare,
    Seconds,
    Share,
    ShareBelowOne,
    Tokens,
    Weight,
)
from torchtitan_rl.generation.engine import MAX_TEMPERATURE, MIN_TEMPERATURE

_IS_RANDOM = Check(
    lambda temperature: MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE,
    f"give {MIN_TEMPERATURE} to {MAX_TEMPERATURE}; greedy siblings would be identical and train "
    "nothing",
)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How completions are sampled.

    Where ``top_p``, ``top_k`` or ``min_p`` exclude tokens, the loss compares distributions over the
    remaining ones: see `training/losses/policy.py`. Evaluation samples from all tokens.
    """

    temperature: Annotated[float, _IS_RANDOM] = 1.0
    """Divisor of the logits before sampling; recorded logprobs are those after the division. Lower
    it for less random rollouts."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1 keeps
    every token."""
    top_k: Count = 0
    """Sample from the most likely ``top_k`` tokens; 0 keeps every token."""
    min_p: ShareBelowOne = 0.0
    """Exclude tokens less likely than this share of the most likely token's probability; 0 keeps
    every token."""
    max_tokens_per_turn: Tokens = 64
    """Maximum length of one turn's completion, in tokens. Raise it if many completions end with
    ``length``."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """How training treats completions whose length is near ``max_tokens_per_turn``. The rewards in
    metrics and evaluations are not changed."""

    buffer_tokens: Annotated[int, Interval(ge=0, le=1 << 24)] = 0
    """Number of tokens before the limit over which the reward falls linearly; 0 turns the penalty
    off."""
    penalty: Weight = 1.0
    """Amount subtracted from the reward of a completion that reaches the limit."""
    mask: bool = False
    """Leave rollouts with a completion that reached the limit out of the loss; their rewards still
    count in the group's baseline."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Groups, turns and limits of rollouts."""

    groups_per_step: Annotated[int, Interval(ge=1, le=1 << 16)] = 16
    """Number of problems that each training step uses (P). More give a less noisy gradient."""
    group_size: Annotated[int, Interval(ge=2, le=1 << 12)] = 8
    """Rollouts of each problem, at least 2; advantages compare them with each other. Raise it if
    the rewards of many groups are all equal."""
    max_turns: Positive = 3
    """Maximum number of turns; a rollout that needs more ends with the status ``max_turns``."""
    max_total_tokens: Annotated[int, Interval(ge=2, le=1 << 24)] = 512
    """Maximum length of a rollout, prompts and completions together, in tokens; at most
    ``generator.max_model_len``. A rollout without room for another turn ends with the status
    ``max_tokens``."""
    step_timeout_s: Seconds = 60.0
    """Deadline of one call of the environment, or for an agent between two requests, in seconds."""
    rollout_timeout_s: Seconds = 3600.0
    """Deadline of a rollout from its reset to its last turn, without pauses, in seconds. It ends
    generation, but not a call of the environment, which has ``step_timeout_s``. A rollout that
    reaches it is not trained on."""
    advantage: Name = "mean"
    """How rewards become advantages. ``mean``: reward minus the group's mean (Dr. GRPO); ``std``:
    the same divided by the group's standard deviation (GRPO); ``leave_one_out``: reward minus the
    mean of the others (RLOO); ``pair``: 1 for the best rollout and -1 for the worst one, the others
    are left out of the loss; ``none``: 0, so that only a ``teacher`` trains; or a function of your
    own, as ``package.module:function`` or ``path/file.py:function``."""
    credit: Literal["outcome", "turn"] = "outcome"
    """Which reward each turn is trained on: the ``outcome`` of its rollout, or its own
    ``turn_reward`` plus the later ones, compared with the siblings' at the same ``turn``."""
    turn_discount: Share = 1.0
    """Weight of the next turn's reward, 0 to 1; only with ``credit`` ``turn``."""
    final_reward_weight: Weight = 1.0
    """Weight of the rollout's reward, which counts after the last turn; only with ``credit``
    ``turn``. Set it to 0 if the rewards of the turns are complete, as in games."""
    replay_routing: bool | None = None
    """For a policy with experts: record the experts that the engines chose for each token, and let
    the trainer compute the token with the same experts. None: if the policy has experts. See
    `docs/moe.md`."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
