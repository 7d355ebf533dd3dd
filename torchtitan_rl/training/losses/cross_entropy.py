"""Supervised training."""

from __future__ import annotations

import torch

from torchtitan_rl.training.losses.tokens import LossOutput


def cross_entropy_loss(
    logprobs_T: torch.Tensor, trained_T: torch.Tensor, *, num_trained: int
) -> LossOutput:
    """Mean negative logprob of the trained tokens."""
    zero = torch.zeros((), dtype=logprobs_T.dtype, device=logprobs_T.device)
    loss = -torch.where(trained_T, logprobs_T, zero).sum() / num_trained
    return LossOutput(loss=loss, sums={}, maxima={})
