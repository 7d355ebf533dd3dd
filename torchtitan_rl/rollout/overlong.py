"""Answers that are too long: a penalty that grows before the limit, or no loss at all. Pure.

Both are of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.4): "soft overlong punishment" and
"overlong filtering".
"""

from __future__ import annotations

from torchtitan_rl.rollout.config import OverlongConfig
from torchtitan_rl.types import Completion, FinishReason, Rollout


def is_cut(rollout: Rollout) -> bool:
    """Whether one of its turns ended at its budget of tokens."""
    return any(turn.completion.finish_reason is FinishReason.LENGTH for turn in rollout.turns)


def overlong_penalty(rollout: Rollout, config: OverlongConfig, *, max_tokens: int) -> float:
    """What is taken off the reward, for the longest of the rollout's turns.

    With a limit L (``max_tokens``) and a buffer B, a turn of n tokens costs ``penalty`` times
    ``min(1, max(0, (n - (L - B)) / B))``; one that was cut costs all of it.
    """
    if not config.buffer_tokens:
        return 0.0
    shares = (_share(turn.completion, config.buffer_tokens, max_tokens) for turn in rollout.turns)
    return config.penalty * max(shares, default=0.0)


def _share(completion: Completion, buffer: int, max_tokens: int) -> float:
    if completion.finish_reason is FinishReason.LENGTH:
        return 1.0
    beyond = len(completion.token_ids) - (max_tokens - buffer)
    return min(1.0, max(0.0, beyond / buffer))
