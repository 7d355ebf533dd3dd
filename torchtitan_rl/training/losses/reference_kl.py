"""Estimates of KL(policy || reference) on sampled tokens."""

from __future__ import annotations

from typing import Literal, assert_never

import torch

Estimator = Literal["k1", "k2", "k3"]


def reference_kl(
    logprobs_T: torch.Tensor,
    reference_T: torch.Tensor,
    *,
    estimator: Estimator,
    max_log_ratio: float,
) -> torch.Tensor:
    """[T]: with d = log p - log p_reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    On policy, k1 and k2 have the gradient of KL(policy || reference), k3 that of
    KL(reference || policy); on tokens of older versions the mean is over the policy that sampled
    them, and nothing corrects for that. From Schulman 2020, "Approximating KL divergence"; k3 in
    the loss is GRPO's (Shao et al. 2024, 2402.03300). -d is clamped to ± ``max_log_ratio`` before
    k3's exponential.
    """
    difference_T = logprobs_T - reference_T
    match estimator:
        case "k1":
            return difference_T
        case "k2":
            return 0.5 * difference_T.square()
        case "k3":
            inverse_T = (-difference_T).clamp(-max_log_ratio, max_log_ratio)
            return inverse_T.exp() - 1.0 - inverse_T
        case _:
            assert_never(estimator)


def is_in_advantage(estimator: Estimator) -> bool:
    """k1 is subtracted from the advantages (as from the rewards in InstructGPT, Ouyang et al. 2022,
    2203.02155): differentiated in the loss, its gradient is that of log p, whose expectation is 0
    (Tang and Munos 2025, 2506.09477). k2 and k3 are differentiated in the loss."""
    return estimator == "k1"
