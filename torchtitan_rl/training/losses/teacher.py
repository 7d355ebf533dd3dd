"""The loss of distillation over a teacher's most likely tokens.

Shapes: T tokens of one part (microbatch) of a step, K of the teacher's tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses.metrics import LossOutput, LossTokens, StepTotals
from torchtitan_rl.training.losses.policy import aggregate

_MIN_TAIL = 1e-6  # of float32; a smaller rest of the vocabulary has no gradient


def teacher_kl(
    logprobs_TK: torch.Tensor, teacher_TK: torch.Tensor, known_T: torch.Tensor
) -> torch.Tensor:
    """Return [T]: KL(q || p) of the teacher q and the policy p, over the teacher's K most likely
    tokens and the rest of the vocabulary as one token; 0 where ``known_T`` is False or the
    teacher's logprobs are NaN.

        sum_k q_k (log q_k - log p_k) + q_rest (log q_rest - log p_rest)

    This is at most the KL over the whole vocabulary, and never negative (data processing
    inequality). Without the rest, the sum could be lowered by moving probability to tokens that the
    teacher finds unlikely.
    """
    known_T = known_T & teacher_TK.isfinite().all(dim=1)
    zero = torch.zeros((), dtype=logprobs_TK.dtype, device=logprobs_TK.device)
    known_T1 = known_T[:, None]
    logprobs_TK = torch.where(known_T1, logprobs_TK, zero)
    teacher_TK = torch.where(known_T1, teacher_TK, zero)
    q_TK = teacher_TK.exp()
    kl_T = (q_TK * (teacher_TK - logprobs_TK)).sum(dim=1)
    q_rest_T = (1.0 - q_TK.sum(dim=1)).clamp_min(_MIN_TAIL)
    p_rest_T = (1.0 - logprobs_TK.exp().sum(dim=1)).clamp_min(_MIN_TAIL)
    kl_T = kl_T + q_rest_T * (q_rest_T.log() - p_rest_T.log())
    return torch.where(known_T, kl_T, zero)


def add_teacher(
    loss: LossOutput,
    tokens: LossTokens,
    kl_T: torch.Tensor,
    *,
    coefficient: float,
    totals: StepTotals,
    config: LossConfig,
) -> LossOutput:
    """Return the loss of any policy loss plus ``coefficient`` x the aggregated ``kl_T``."""
    terms_T, divisor = aggregate(coefficient * kl_T, tokens, totals, config)
    terms_T = terms_T / divisor
    own_T = loss.terms_T
    return replace(
        loss,
        loss=loss.loss + terms_T.sum(),
        sums=loss.sums | {"kl_teacher": kl_T.detach().sum()},
        terms_T=None if own_T is None else own_T + terms_T.detach(),
    )
