"""Terms of tokens -> the step's scalar. Each way adds up over parts of the step."""

from __future__ import annotations

from typing import Literal, assert_never

import torch

from torchtitan_rl.training.losses.tokens import LossTokens, StepTotals

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregate(
    terms_T: torch.Tensor,
    tokens: LossTokens,
    totals: StepTotals,
    *,
    how: Aggregation,
    constant_length: int,
) -> torch.Tensor:
    """A scalar; ``terms_T`` are 0 where a token is not trained on.

    `token_mean`: each token of the step counts the same (DAPO, Yu et al. 2025, 2503.14476).
    `sequence_mean`: each sequence does, its tokens sharing (GRPO, Shao et al. 2024, 2402.03300).
    `constant`: the sum over a sequence divided by ``constant_length`` whatever its length, so that
    long wrong answers are not favoured (Dr. GRPO, Liu et al. 2025, 2503.20783).
    """
    match how:
        case "token_mean":
            return terms_T.sum() / totals.num_tokens
        case "sequence_mean":
            return (terms_T / tokens.sequence_lengths()).sum() / totals.num_sequences
        case "constant":
            return terms_T.sum() / (totals.num_sequences * constant_length)
        case _:
            assert_never(how)
