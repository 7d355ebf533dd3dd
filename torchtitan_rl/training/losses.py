"""Losses over ``[tokens]`` tensors: pure functions, no model, no process group.

Each loss is a *sum* over trained tokens divided by the number of trained tokens of the whole
optimizer step, so that summing losses (and gradients) over microbatches and ranks gives the same
whatever the split. Values where ``trained_T`` is False are never read, NaN included.

The ratio is anchored on the logprobs that the tokens were sampled with; they are never recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchtitan_rl.config import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """``loss`` is a scalar with a graph. ``sums`` add up over parts of a step and become means
    when divided by its number of trained tokens; of ``maxima`` the largest counts. Detached."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def policy_loss(
    logprobs_T: torch.Tensor,
    behaviour_T: torch.Tensor,
    advantages_T: torch.Tensor,
    trained_T: torch.Tensor,
    *,
    num_trained: int,
    config: LossConfig,
) -> LossOutput:
    """GRPO's clipped surrogate, -min(r A, clip(r, 1 - low, 1 + high) A), r = p / p_behaviour.

    From Schulman et al. 2017 (PPO) with a clip of its own for each side (DAPO, Yu et al. 2025).
    The log-ratio is clamped to ± ``max_log_ratio`` before the exponential; clamped tokens carry no
    gradient. KL estimates of behaviour against policy: ``kl_k1`` is the mean log-ratio, ``kl_k3``
    the low-variance one that is never negative (Schulman 2020).
    """
    zero = torch.zeros((), dtype=logprobs_T.dtype, device=logprobs_T.device)
    difference_T = torch.where(trained_T, logprobs_T, zero) - torch.where(
        trained_T, behaviour_T, zero
    )
    advantages_T = torch.where(trained_T, advantages_T, zero)
    log_ratio_T = difference_T.clamp(-config.max_log_ratio, config.max_log_ratio)
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    loss = -surrogate_T.sum() / num_trained

    with torch.no_grad():
        clipped_low_T = (ratio_T < 1.0 - config.clip_low) & (advantages_T < 0)
        clipped_high_T = (ratio_T > 1.0 + config.clip_high) & (advantages_T > 0)
        distance_T = difference_T.abs()
        sums = {
            "ratio_mean": torch.where(trained_T, ratio_T, zero).sum(),
            "clip_share_low": clipped_low_T.sum(),
            "clip_share_high": clipped_high_T.sum(),
            "clip_share": (clipped_low_T | clipped_high_T).sum(),
            "logprob_diff_mean": distance_T.sum(),
            "kl_k1": -difference_T.sum(),
            "kl_k3": (ratio_T - 1.0 - log_ratio_T).sum(),
            "clamped_log_ratio": (distance_T > config.max_log_ratio).sum(),
        }
        maxima = {
            "ratio_max": _max(torch.where(trained_T, ratio_T, zero)),
            "logprob_diff_max": _max(distance_T),
        }
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def cross_entropy_loss(
    logprobs_T: torch.Tensor, trained_T: torch.Tensor, *, num_trained: int
) -> LossOutput:
    """Mean negative logprob of the trained tokens: supervised training."""
    zero = torch.zeros((), dtype=logprobs_T.dtype, device=logprobs_T.device)
    loss = -torch.where(trained_T, logprobs_T, zero).sum() / num_trained
    return LossOutput(loss=loss, sums={}, maxima={})


def _max(values_T: torch.Tensor) -> torch.Tensor:
    return values_T.max() if values_T.numel() else values_T.new_zeros(())
