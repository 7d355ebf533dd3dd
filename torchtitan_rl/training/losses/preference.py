"""The loss of DPO as a sum over tokens: see `training/preference.py`.

Shapes: T tokens of one part (microbatch) of a step.
"""

from __future__ import annotations

import torch

from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses.metrics import LossOutput, LossTokens, StepTotals, policy_metrics


def preference_loss(
    tokens: LossTokens, *, totals: StepTotals, config: LossConfig, mean_loss: float
) -> LossOutput:
    """Return a part of the update's ``mean_loss`` of pairs, by its share of the tokens, with the
    gradient of that loss. ``tokens.advantages_T`` is minus the derivative of ``mean_loss`` by the
    token's logprob. DPO has no ratio; metrics show how far the policy is from the sampling one."""
    tokens = tokens.cleaned()
    change_T = tokens.logprobs_T - tokens.logprobs_T.detach()
    share = tokens.trained_T.sum() / totals.num_tokens
    unclipped_T = torch.zeros_like(tokens.trained_T)
    sums, maxima = policy_metrics(
        tokens, config, clipped_low_T=unclipped_T, clipped_high_T=unclipped_T
    )
    loss = mean_loss * share - (tokens.advantages_T * change_T).sum()
    return LossOutput(loss=loss, sums=sums, maxima=maxima)
