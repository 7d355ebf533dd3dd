"""The policy loss, put together from its parts as `LossConfig` says."""

from __future__ import annotations

import torch

from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses.age_metrics import age_maxima, age_sums
from torchtitan_rl.training.losses.aggregation import aggregate
from torchtitan_rl.training.losses.importance import truncated_weights, within_bounds
from torchtitan_rl.training.losses.ratios import proximal_logprobs, sequence_log_ratios
from torchtitan_rl.training.losses.reference_kl import is_in_advantage, reference_kl
from torchtitan_rl.training.losses.surrogates import (
    Surrogate,
    cispo_surrogate,
    clipped_surrogate,
)
from torchtitan_rl.training.losses.tokens import LossOutput, LossTokens, StepTotals


def policy_loss(tokens: LossTokens, *, totals: StepTotals, config: LossConfig) -> LossOutput:
    """-aggregate(keep x weight x surrogate(ratio, advantage) - coefficient x KL to the reference).

    Each factor has its file, with its source. Log-ratios are clamped to ± ``max_log_ratio`` before
    the exponential; clamped tokens carry no gradient. Weight and mask do not touch the KL penalty,
    unless it is in the advantage (k1).

    Raises:
        ValueError: a KL penalty is asked for, and the tokens have no reference logprobs.
    """
    tokens = tokens.cleaned()
    proximal_T = proximal_logprobs(tokens, config.proximal_policy)
    kl_T = _reference_kl(tokens, config)
    advantages_T = tokens.advantages_T
    if kl_T is not None and is_in_advantage(config.kl_estimator):
        advantages_T = advantages_T - config.kl_coefficient * kl_T.detach()

    surrogate = _surrogate(tokens, proximal_T, advantages_T, config)
    terms_T = surrogate.terms_T
    difference_T = (tokens.logprobs_T - tokens.behaviour_T).detach()
    sums: dict[str, torch.Tensor] = {}
    if config.importance_weight != "none":
        weights_T = truncated_weights(
            proximal_T - tokens.behaviour_T,
            tokens,
            level=config.importance_weight,
            cap=config.importance_weight_cap,
            max_log_ratio=config.max_log_ratio,
        )
        terms_T = terms_T * weights_T
        sums["weight_mean"] = (weights_T * tokens.trained_T).sum()
        sums["weight_capped_share"] = (
            (weights_T >= config.importance_weight_cap) & tokens.trained_T
        ).sum()
    masked_T = torch.zeros_like(tokens.trained_T)
    if config.mask != "none":
        kept_T = within_bounds(
            difference_T, tokens, level=config.mask, low=config.mask_low, high=config.mask_high
        )
        terms_T = torch.where(kept_T, terms_T, torch.zeros_like(terms_T))
        masked_T = tokens.trained_T & ~kept_T
    if kl_T is not None:
        sums["kl_reference"] = kl_T.detach().sum()
        if not is_in_advantage(config.kl_estimator):
            terms_T = terms_T - config.kl_coefficient * kl_T
    loss = -aggregate(
        terms_T, tokens, totals, how=config.aggregation, constant_length=config.constant_length
    )
    with torch.no_grad():
        more, maxima = _metrics(tokens, difference_T, surrogate, masked_T, config)
    return LossOutput(loss=loss, sums=sums | more, maxima=maxima)


def _reference_kl(tokens: LossTokens, config: LossConfig) -> torch.Tensor | None:
    if config.kl_coefficient == 0.0:
        return None
    if tokens.reference_T is None:
        raise ValueError(f"kl_coefficient is {config.kl_coefficient}: give reference logprobs")
    return reference_kl(
        tokens.logprobs_T,
        tokens.reference_T,
        estimator=config.kl_estimator,
        max_log_ratio=config.max_log_ratio,
    )


def _surrogate(
    tokens: LossTokens, proximal_T: torch.Tensor, advantages_T: torch.Tensor, config: LossConfig
) -> Surrogate:
    log_ratios_T = tokens.logprobs_T - proximal_T
    if config.ratio == "sequence":
        log_ratios_T = sequence_log_ratios(log_ratios_T, tokens)
    ratios_T = log_ratios_T.clamp(-config.max_log_ratio, config.max_log_ratio).exp()
    low, high = config.clip_low, config.clip_high
    if config.surrogate == "cispo":
        return cispo_surrogate(ratios_T, advantages_T, tokens.logprobs_T, low=low, high=high)
    return clipped_surrogate(ratios_T, advantages_T, low=low, high=high)


def _metrics(
    tokens: LossTokens,
    difference_T: torch.Tensor,
    surrogate: Surrogate,
    masked_T: torch.Tensor,
    config: LossConfig,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """How far policy and behaviour are apart, whatever the proximal policy: sums and maxima.

    KL of behaviour against policy: ``kl_k1`` is minus the log-ratio, ``kl_k3`` the low-variance
    estimate that is never negative (Schulman 2020).
    """
    log_ratios_T = difference_T.clamp(-config.max_log_ratio, config.max_log_ratio)
    ratios_T = log_ratios_T.exp()
    kl_k3_T = ratios_T - 1.0 - log_ratios_T
    distance_T = difference_T.abs()
    low_T = surrogate.clipped_low_T & tokens.trained_T
    high_T = surrogate.clipped_high_T & tokens.trained_T
    zero = torch.zeros_like(ratios_T)
    sums = {
        "ratio_mean": torch.where(tokens.trained_T, ratios_T, zero).sum(),
        "clip_share_low": low_T.sum(),
        "clip_share_high": high_T.sum(),
        "clip_share": (low_T | high_T).sum(),
        "masked_share": masked_T.sum(),
        "logprob_diff_mean": distance_T.sum(),
        "kl_k1": -difference_T.sum(),
        "kl_k3": kl_k3_T.sum(),
        "clamped_log_ratio": (distance_T > config.max_log_ratio).sum(),
        "by_age": age_sums(tokens, ratios_T, low_T | high_T, masked_T, kl_k3_T),
    }
    maxima = {
        "ratio_max": _max(torch.where(tokens.trained_T, ratios_T, zero)),
        "logprob_diff_max": _max(distance_T),
        "by_age": age_maxima(tokens, ratios_T),
    }
    return sums, maxima


def _max(values_T: torch.Tensor) -> torch.Tensor:
    return values_T.max() if values_T.numel() else values_T.new_zeros(())
