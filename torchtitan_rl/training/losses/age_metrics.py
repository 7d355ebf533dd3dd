"""How far off policy tokens are, by their age: sums and maxima of a part, metrics of the totals.

Age is the trainer's version minus the version that a token was sampled under; the last bucket
holds all older ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan_rl.training.losses.tokens import LossTokens

AGE_BUCKETS = ("age_0", "age_1", "age_2", "age_3plus")


def age_sums(
    tokens: LossTokens,
    ratios_T: torch.Tensor,
    clipped_T: torch.Tensor,
    masked_T: torch.Tensor,
    kl_T: torch.Tensor,
) -> torch.Tensor:
    """[6, buckets], in float64 (squares of ratios are large): trained tokens, and over them the
    sums of ratio, squared ratio, clipped, masked and KL."""
    trained_T = tokens.trained_T.double()
    ratios_T = ratios_T.double() * trained_T
    columns_6T = torch.stack(
        [
            trained_T,
            ratios_T,
            ratios_T.square(),
            clipped_T.double(),
            masked_T.double(),
            kl_T.double() * trained_T,
        ]
    )
    return columns_6T.new_zeros(6, len(AGE_BUCKETS)).index_add(1, _buckets(tokens), columns_6T)


def age_maxima(tokens: LossTokens, ratios_T: torch.Tensor) -> torch.Tensor:
    """[buckets]: the largest ratio, 0 where there is no token."""
    ratios_T = ratios_T * tokens.trained_T
    return ratios_T.new_zeros(len(AGE_BUCKETS)).scatter_reduce(
        0, _buckets(tokens), ratios_T, reduce="amax"
    )


def effective_share(num_tokens: float, ratio_sum: float, square_sum: float) -> float:
    """Kish's effective sample size, (sum w)^2 / sum w^2, as a share of the tokens (Kong 1992); 0
    where every ratio underflowed."""
    return ratio_sum**2 / (num_tokens * square_sum) if square_sum != 0 else 0.0


def age_metrics(
    totals_6A: Sequence[Sequence[float]], maxima_A: Sequence[float]
) -> dict[str, float]:
    """Metrics of the buckets that have tokens, and the effective share of all tokens."""
    metrics: dict[str, float] = {}
    for bucket, column, ratio_max in zip(
        AGE_BUCKETS, zip(*totals_6A, strict=True), maxima_A, strict=True
    ):
        num_tokens, ratio, square, clipped, masked, kl = column
        if num_tokens == 0:
            continue
        metrics |= {
            f"{bucket}/tokens": num_tokens,
            f"{bucket}/ratio_mean": ratio / num_tokens,
            f"{bucket}/ratio_max": ratio_max,
            f"{bucket}/clip_share": clipped / num_tokens,
            f"{bucket}/masked_share": masked / num_tokens,
            f"{bucket}/kl_k3": kl / num_tokens,
            f"{bucket}/effective_share": effective_share(num_tokens, ratio, square),
        }
    num_tokens, ratio, square = (sum(row) for row in totals_6A[:3])
    return metrics | {"effective_share": effective_share(num_tokens, ratio, square)}


def _buckets(tokens: LossTokens) -> torch.Tensor:
    return tokens.ages_T.clamp(0, len(AGE_BUCKETS) - 1)
