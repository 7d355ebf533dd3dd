"""What is maximized for each token, given its ratio and advantage."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """``terms_T`` are summed and maximized; tokens whose ratio hit a bound are marked."""

    terms_T: torch.Tensor
    clipped_low_T: torch.Tensor
    clipped_high_T: torch.Tensor


def clipped_surrogate(
    ratios_T: torch.Tensor, advantages_T: torch.Tensor, *, low: float, high: float
) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A): beyond a bound a token carries no gradient, but only
    where it would move on.

    From Schulman et al. 2017 (PPO, 1707.06347), with a bound of its own for each side (DAPO, Yu et
    al. 2025, 2503.14476).
    """
    bounded_T = ratios_T.clamp(1.0 - low, 1.0 + high)
    return Surrogate(
        terms_T=torch.minimum(ratios_T * advantages_T, bounded_T * advantages_T),
        clipped_low_T=(ratios_T < 1.0 - low) & (advantages_T < 0),
        clipped_high_T=(ratios_T > 1.0 + high) & (advantages_T > 0),
    )


def cispo_surrogate(
    ratios_T: torch.Tensor,
    advantages_T: torch.Tensor,
    logprobs_T: torch.Tensor,
    *,
    low: float,
    high: float,
) -> Surrogate:
    """sg(clip(r, 1 - low, 1 + high)) A log p: the ratio is a bounded weight, and every token keeps
    its gradient. The value itself means nothing.

    From MiniMax-M1 (2025, 2506.13585), CISPO, which in effect has no lower bound (low near 1).
    """
    ratios_T = ratios_T.detach()
    return Surrogate(
        terms_T=ratios_T.clamp(1.0 - low, 1.0 + high) * advantages_T * logprobs_T,
        clipped_low_T=ratios_T < 1.0 - low,
        clipped_high_T=ratios_T > 1.0 + high,
    )
