"""Corrections for who sampled: truncated weights and masks. Neither carries a gradient.

All functions take cleaned tokens.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

import torch

from torchtitan_rl.training.losses.tokens import LossTokens

WeightLevel = Literal["token", "sequence"]
MaskLevel = Literal["token", "sequence", "geometric"]


def truncated_weights(
    log_weights_T: torch.Tensor,
    tokens: LossTokens,
    *,
    level: WeightLevel,
    cap: float,
    max_log_ratio: float,
) -> torch.Tensor:
    """[T]: min(w, cap), w = p_prox / p_behaviour of the token, or the product over its sequence.

    Token level: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (TIS). Sequence level: Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying
    RL Collapse from the Training-Inference Mismatch" (Seq-TIS). Log-weights are clamped to
    ± ``max_log_ratio`` before the exponential.
    """
    log_weights_T = log_weights_T.detach()
    if level == "sequence":
        log_weights_T = tokens.sequence_sum(log_weights_T)
    return log_weights_T.clamp(-max_log_ratio, max_log_ratio).exp().clamp_max(cap)


def within_bounds(
    log_ratios_T: torch.Tensor, tokens: LossTokens, *, level: MaskLevel, low: float, high: float
) -> torch.Tensor:
    """[T] bool: whether low <= p / p_behaviour <= high, of the token or of its whole sequence.

    `token`: IcePop (Ling team 2025, "Every Step Evolves", 2510.18855): two-sided, whatever the
    advantage's sign. `sequence`: the product of the ratios (masked importance sampling, Liu, Li et
    al. 2025, as above). `geometric`: their geometric mean, which does not grow with the length (Li,
    Liu et al. 2025, "Trust Region Masking for Long-Horizon LLM RL", 2512.23075, and verl's rollout
    correction).
    """
    match level:
        case "token":
            pass
        case "sequence":
            log_ratios_T = tokens.sequence_sum(log_ratios_T)
        case "geometric":
            log_ratios_T = tokens.sequence_mean(log_ratios_T)
        case _:
            assert_never(level)
    # In logs: the product over a long sequence overflows.
    return (log_ratios_T >= math.log(low)) & (log_ratios_T <= math.log(high))
