"""The input and output of a loss, and the metrics of the policy loss. Sums and maxima of each part
are computed first, then metrics from the totals of the step.

Metrics by age show how far off-policy the tokens of each age (`LossTokens.ages_T`) are.

Shapes: T tokens of a part, A buckets of ages (`AGE_BUCKETS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torchtitan_rl.training.config import LossConfig

AGE_BUCKETS = ("age_0", "age_1", "age_2", "age_3plus")
_BY_AGE = "by_age"
# Reported as sums, not as means over trained tokens.
_COUNTS = ("loss", "sft_loss", "clamped_log_ratio")


@torch.no_grad()
def policy_metrics(
    tokens: LossTokens,
    config: LossConfig,
    *,
    clipped_low_T: torch.Tensor,
    clipped_high_T: torch.Tensor,
    kept_T: torch.Tensor | None = None,
    weights_T: torch.Tensor | None = None,
    kl_T: torch.Tensor | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Compute sums and maxima of one part, for `LossOutput`. Ratios are policy / behaviour, with
    any proximal policy.

    ``kl_k1`` and ``kl_k3`` estimate KL(behaviour || policy): ``kl_k1`` is minus the log-ratio, and
    ``kl_k3`` is the low-variance estimate that is never negative (Schulman 2020, "Approximating KL
    divergence").
    """
    trained_T = tokens.trained_T
    difference_T = tokens.logprobs_T - tokens.behaviour_T
    distance_T = difference_T.abs()
    log_ratios_T = difference_T.clamp(-config.max_log_ratio, config.max_log_ratio)
    ratios_T = log_ratios_T.exp()
    kl_k3_T = ratios_T - 1.0 - log_ratios_T
    ratios_T = torch.where(trained_T, ratios_T, torch.zeros_like(ratios_T))
    low_T, high_T = clipped_low_T & trained_T, clipped_high_T & trained_T
    masked_T = torch.zeros_like(trained_T) if kept_T is None else trained_T & ~kept_T

    sums = {}
    if weights_T is not None:
        sums["weight_mean"] = (weights_T * trained_T).sum()
        is_capped_T = weights_T >= config.importance_weight_cap
        sums["weight_capped_share"] = (is_capped_T & trained_T).sum()
    if kl_T is not None:
        sums["kl_reference"] = kl_T.sum()
    sums |= {
        "ratio_mean": ratios_T.sum(),
        "clip_share_low": low_T.sum(),
        "clip_share_high": high_T.sum(),
        "clip_share": (low_T | high_T).sum(),
        "masked_share": masked_T.sum(),
        "logprob_diff_mean": distance_T.sum(),
        "kl_k1": -difference_T.sum(),
        "kl_k3": kl_k3_T.sum(),
        "clamped_log_ratio": (distance_T > config.max_log_ratio).sum(),
        _BY_AGE: _sums_by_age(tokens, ratios_T, low_T | high_T, masked_T, kl_k3_T, distance_T),
    }
    buckets_2T = _buckets(tokens).expand(2, -1)
    largest_2A = ratios_T.new_zeros(2, len(AGE_BUCKETS)).scatter_reduce(
        1, buckets_2T, torch.stack([ratios_T, distance_T]), reduce="amax"
    )
    maxima = {
        "ratio_max": _max(ratios_T),
        "logprob_diff_max": _max(distance_T),
        _BY_AGE: largest_2A,
    }
    return sums, maxima


def loss_metrics(
    sums: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor], *, num_trained: int
) -> dict[str, float]:
    """Compute metrics by name, as in the table of metrics, from the totals over all parts of a
    step."""
    metrics = {
        name: total.item() if name in _COUNTS else total.item() / num_trained
        for name, total in sums.items()
        if name != _BY_AGE
    }
    metrics |= {name: total.item() for name, total in maxima.items() if name != _BY_AGE}
    if _BY_AGE in sums:
        metrics |= _metrics_by_age(sums[_BY_AGE].tolist(), maxima[_BY_AGE].tolist())
    return metrics


def _sums_by_age(
    tokens: LossTokens,
    ratios_T: torch.Tensor,
    clipped_T: torch.Tensor,
    masked_T: torch.Tensor,
    kl_T: torch.Tensor,
    distance_T: torch.Tensor,
) -> torch.Tensor:
    """Return [7, A] in float64: each bucket's number of trained tokens, and their sums of ratio,
    squared ratio, clipped, masked, KL and distance of logprobs."""
    ratios_T = ratios_T.double()
    columns = [tokens.trained_T, ratios_T, ratios_T.square(), clipped_T, masked_T, kl_T, distance_T]
    columns_7T = torch.stack([column.double() for column in columns])
    return columns_7T.new_zeros(7, len(AGE_BUCKETS)).index_add(1, _buckets(tokens), columns_7T)


def _metrics_by_age(
    totals_7A: Sequence[Sequence[float]], maxima_2A: Sequence[Sequence[float]]
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    columns = zip(AGE_BUCKETS, *totals_7A, *maxima_2A, strict=True)
    for bucket, num_tokens, ratio, square, clipped, masked, kl, distance, *largest in columns:
        if num_tokens == 0:
            continue
        metrics |= {
            f"{bucket}/tokens": num_tokens,
            f"{bucket}/ratio_mean": ratio / num_tokens,
            f"{bucket}/ratio_max": largest[0],
            f"{bucket}/clip_share": clipped / num_tokens,
            f"{bucket}/masked_share": masked / num_tokens,
            f"{bucket}/kl_k3": kl / num_tokens,
            f"{bucket}/logprob_diff_mean": distance / num_tokens,
            f"{bucket}/logprob_diff_max": largest[1],
            f"{bucket}/effective_share": _effective_share(num_tokens, ratio, square),
        }
    num_tokens, ratio, square = (sum(row) for row in totals_7A[:3])
    return metrics | {"effective_share": _effective_share(num_tokens, ratio, square)}


def _effective_share(num_tokens: float, ratio_sum: float, square_sum: float) -> float:
    """Kish's effective sample size, (sum w)^2 / sum w^2, as a share of the tokens (Kong 1992); 0 if
    every ratio underflowed."""
    return ratio_sum**2 / (num_tokens * square_sum) if square_sum != 0 else 0.0


def _buckets(tokens: LossTokens) -> torch.Tensor:
    """Return [T]: each token's bucket; the last one has all older tokens."""
    return tokens.ages_T.clamp(0, len(AGE_BUCKETS) - 1)


def _max(values_T: torch.Tensor) -> torch.Tensor:
    return values_T.max() if values_T.numel() else values_T.new_zeros(())


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """The T tokens of one part (microbatch) of a step. Entry i of each tensor describes token i.

    All trained tokens of a sequence (episode) are in the same part. Only ``logprobs_T`` has a
    gradient. Values where ``trained_T`` is False are never read, NaN included.
    """

    logprobs_T: torch.Tensor  # under the policy being trained
    behaviour_T: torch.Tensor  # logprobs under the policy that sampled the tokens
    advantages_T: torch.Tensor
    trained_T: torch.Tensor  # bool
    ages_T: torch.Tensor  # int64; trainer version minus the version that sampled the token
    sequences_T: torch.Tensor  # int64; number of the token's sequence, in 0 .. T - 1
    reference_T: torch.Tensor | None = None  # logprobs under the reference model
    before_T: torch.Tensor | None = None  # under the weights before the step; None: use logprobs_T

    def cleaned(self) -> LossTokens:
        """Return these tokens with logprobs and advantages of untrained tokens set to 0."""
        zero = torch.zeros((), dtype=self.logprobs_T.dtype, device=self.logprobs_T.device)

        def clean(values_T: torch.Tensor) -> torch.Tensor:
            return torch.where(self.trained_T, values_T, zero)

        return replace(
            self,
            logprobs_T=clean(self.logprobs_T),
            behaviour_T=clean(self.behaviour_T),
            advantages_T=clean(self.advantages_T),
            reference_T=None if self.reference_T is None else clean(self.reference_T),
            before_T=None if self.before_T is None else clean(self.before_T),
        )

    def sequence_sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return [T]: for each token the sum over its sequence. ``values_T`` must be 0 for
        untrained tokens."""
        sums_T = values_T.new_zeros(len(values_T)).index_add(0, self.sequences_T, values_T)
        return sums_T[self.sequences_T]

    def sequence_lengths(self) -> torch.Tensor:
        """Return [T]: for each token the number of trained tokens in its sequence, at least 1."""
        return self.sequence_sum(self.trained_T.to(self.logprobs_T.dtype)).clamp_min(1.0)

    def sequence_mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return [T]: for each token the mean over the trained tokens of its sequence."""
        return self.sequence_sum(values_T) / self.sequence_lengths()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """The size of the batch (or minibatch) of an optimizer update, over all ranks and microbatches.
    Tokens that the loss masks by their ratio are included, so the totals are known before the first
    forward pass."""

    num_tokens: int  # number of trained tokens
    num_sequences: int  # number of sequences with at least one trained token


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The result of a loss. ``loss`` is a scalar with a graph; the other tensors are detached.
    ``sums`` and ``maxima`` have any shape. Over the parts of a step, ``sums`` are added and
    ``maxima`` maximized; `loss_metrics` reads the totals. ``terms_T`` has each token's part of the
    loss, for ``torchtitan-rl replay``; None: the loss does not tell."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]
    terms_T: torch.Tensor | None = None


def cross_entropy_loss(
    logprobs_T: torch.Tensor, trained_T: torch.Tensor, *, num_trained: int
) -> LossOutput:
    """Compute the loss of supervised training: the mean negative logprob of the step's
    ``num_trained`` tokens."""
    zero = torch.zeros((), dtype=logprobs_T.dtype, device=logprobs_T.device)
    loss = -torch.where(trained_T, logprobs_T, zero).sum() / num_trained
    return LossOutput(loss=loss, sums={}, maxima={})
