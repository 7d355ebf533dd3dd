"""The policy loss. `policy_loss` comes first; the functions after it are its steps in order, each
with its formula and paper.

Every function takes cleaned tokens (`LossTokens.cleaned`); p is the policy being trained, A the
advantage. Log-ratios are clamped to ± ``max_log_ratio`` before each exponential; a clamped token
has no gradient.

All distributions are at the sampling temperature. If the sampler excluded tokens (top_p, top_k,
min_p, a grammar), the distribution of each policy (behaviour, proximal, trained, reference) is
renormalized over the tokens that were kept at sampling time. So ratios compare distributions over
the same tokens, and are 1 at age 0. Excluded logits have no gradient. The entropy metric is also
computed from the renormalized distribution.

Shapes: T tokens of one part (microbatch) of a step.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch

from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses.metrics import LossOutput, LossTokens, StepTotals, policy_metrics


def policy_loss(tokens: LossTokens, *, totals: StepTotals, config: LossConfig) -> LossOutput:
    """Compute -aggregate(mask x weight x surrogate(ratio, A) - kl_coefficient x KL(p ||
    reference)).

    Weight and mask do not apply to the KL term. They do apply to k1, because k1 is a part of the
    advantage.

    Raises:
        ValueError: ``kl_coefficient`` is set and the tokens have no reference logprobs.
    """
    tokens = tokens.cleaned()
    advantages_T = tokens.advantages_T
    kl_T = reference_kl(tokens, config)
    if kl_T is not None and config.kl_estimator == "k1":
        advantages_T = advantages_T - config.kl_coefficient * kl_T.detach()

    proximal_T = proximal_logprobs(tokens, config)
    ratios_T = policy_ratios(tokens, proximal_T, config)
    terms_T, clipped_low_T, clipped_high_T = surrogate(tokens, ratios_T, advantages_T, config)
    weights_T = importance_weights(tokens, proximal_T, config)
    if weights_T is not None:
        terms_T = terms_T * weights_T
    kept_T = within_mask_bounds(tokens, config)
    if kept_T is not None:
        terms_T = torch.where(kept_T, terms_T, torch.zeros_like(terms_T))
    if kl_T is not None and config.kl_estimator != "k1":
        terms_T = terms_T - config.kl_coefficient * kl_T

    sums, maxima = policy_metrics(
        tokens,
        config,
        clipped_low_T=clipped_low_T,
        clipped_high_T=clipped_high_T,
        kept_T=kept_T,
        weights_T=weights_T,
        kl_T=kl_T,
    )
    terms_T, divisor = aggregate(terms_T, tokens, totals, config)
    return LossOutput(
        loss=-(terms_T.sum() / divisor),
        sums=sums,
        maxima=maxima,
        terms_T=-terms_T.detach() / divisor,
    )


def reference_kl(tokens: LossTokens, config: LossConfig) -> torch.Tensor | None:
    """Return [T]: estimates of KL(p || reference); None without a KL penalty.

    With d = log p - log p_reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020,
    "Approximating KL divergence"). k2 and k3 are differentiated in the loss; k3 is the estimator
    that GRPO uses (Shao et al. 2024, 2402.03300). k1 is subtracted from the advantages, as
    InstructGPT does from rewards (Ouyang et al. 2022, 2203.02155): in the loss, the gradient of k1
    would be the gradient of log p, whose expectation is 0 (Tang and Munos 2025, 2506.09477).

    On policy, k1 and k2 have the gradient of KL(p || reference), and k3 has the gradient of
    KL(reference || p). For tokens sampled by an older version there is no importance correction:
    the expectation is under the policy that sampled them.
    """
    if config.kl_coefficient == 0.0:
        return None
    if tokens.reference_T is None:
        raise ValueError(f"kl_coefficient is {config.kl_coefficient}: give reference logprobs")
    difference_T = tokens.logprobs_T - tokens.reference_T
    match config.kl_estimator:
        case "k1":
            return difference_T
        case "k2":
            return 0.5 * difference_T.square()
        case "k3":
            inverse_T = (-difference_T).clamp(-config.max_log_ratio, config.max_log_ratio)
            return inverse_T.exp() - 1.0 - inverse_T


def proximal_logprobs(tokens: LossTokens, config: LossConfig) -> torch.Tensor:
    """Return [T]: log p_prox, the denominator of the clipped ratio, without a gradient.

    ``config.proximal_policy`` chooses p_prox:

    - `behaviour`: the policy that sampled the tokens (PPO: Schulman et al. 2017, 1707.06347).
    - `recomputed`: p_before, the policy with the weights before this step. If a step has only one
      update, the forward pass uses these weights: its detached logprobs are log p_prox, the ratio
      is 1, and nothing is clipped.
    - `interpolated`: an estimate of the policy one version before p_before, for a token of age
      d >= 1 (AReaL's prox_approx document, alpha = (v_prox - v_behave) / (v - v_behave) with
      v_prox = v - 1; A-3PO, Li et al. 2025, 2512.06547):

      log p_prox = log p_behaviour + (d - 1) / d x (log p_before - log p_behaviour)

      At d = 1, p_prox is the behaviour policy. At d = 0, p_prox is p_before.

    `recomputed` and `interpolated` are decoupled PPO (Hilton et al. 2021, 2110.00641; for language
    models AReaL, Fu et al. 2025, 2505.24298): the trust region is around the trainer's own step,
    and `importance_weights` corrects for the sampling policy.
    """
    before_T = tokens.logprobs_T.detach() if tokens.before_T is None else tokens.before_T
    match config.proximal_policy:
        case "behaviour":
            return tokens.behaviour_T
        case "recomputed":
            return before_T
        case "interpolated":
            difference_T = before_T - tokens.behaviour_T
            share_T = 1.0 - 1.0 / tokens.ages_T.clamp_min(1).to(difference_T.dtype)
            share_T = torch.where(tokens.ages_T > 0, share_T, torch.ones_like(share_T))
            return tokens.behaviour_T + share_T * difference_T


def policy_ratios(tokens: LossTokens, proximal_T: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Return [T]: p / p_prox of the token, or of its sequence.

    `sequence` (GSPO: Zheng et al. 2025, 2507.18071): the value is the geometric mean over the
    sequence, (p(y) / p_prox(y))^(1/|y|); the gradient is the token's own. This is GSPO-token
    (section 4.3), which equals GSPO if all tokens of a sequence have the same advantage.
    """
    log_ratios_T = tokens.logprobs_T - proximal_T
    if config.ratio == "sequence":
        own_T = log_ratios_T - log_ratios_T.detach()
        log_ratios_T = tokens.sequence_mean(log_ratios_T.detach()) + own_T
    return log_ratios_T.clamp(-config.max_log_ratio, config.max_log_ratio).exp()


def surrogate(
    tokens: LossTokens, ratios_T: torch.Tensor, advantages_T: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the terms [T] to maximize, and which tokens [T] were clipped at the lower and at the
    upper bound.

    `clip`: min(r A, clip(r, 1 - low, 1 + high) A); a token whose ratio is outside of a bound has no
    gradient if the gradient would move the ratio further out. This is PPO's surrogate (Schulman et
    al. 2017, 1707.06347), with a separate bound for each side (DAPO's clip-higher, Yu et al. 2025,
    2503.14476).

    `cispo`: stop_gradient(clip(r, 1 - low, 1 + high)) A log p; every token keeps a gradient. Only
    the gradient is meaningful, not the value. From MiniMax-M1 (2025, 2506.13585), which in effect
    has no lower bound (low near 1).
    """
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    match config.surrogate:
        case "clip":
            bounded_T = ratios_T.clamp(low, high)
            terms_T = torch.minimum(ratios_T * advantages_T, bounded_T * advantages_T)
            clipped_low_T = (ratios_T < low) & (advantages_T < 0)
            clipped_high_T = (ratios_T > high) & (advantages_T > 0)
        case "cispo":
            ratios_T = ratios_T.detach()
            terms_T = ratios_T.clamp(low, high) * advantages_T * tokens.logprobs_T
            clipped_low_T, clipped_high_T = ratios_T < low, ratios_T > high
        case "dpo":
            raise ValueError("surrogate dpo has no terms of single tokens: see preference_loss")
        case _:
            assert_never(config.surrogate)
    return terms_T, clipped_low_T, clipped_high_T


def importance_weights(
    tokens: LossTokens, proximal_T: torch.Tensor, config: LossConfig
) -> torch.Tensor | None:
    """Return [T]: min(w, cap) with w = p_prox / p_behaviour, without a gradient; None without
    weights.

    `token`: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (TIS). `sequence`: the product over the sequence; Liu, Li et al. 2025, "When Speed
    Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (Seq-TIS).
    """
    log_weights_T = (proximal_T - tokens.behaviour_T).detach()
    if config.importance_weight in ("none", "auto"):  # a run has replaced ``auto`` (`decided_loss`)
        return None
    if config.importance_weight == "sequence":
        log_weights_T = tokens.sequence_sum(log_weights_T)
    weights_T = log_weights_T.clamp(-config.max_log_ratio, config.max_log_ratio).exp()
    return weights_T.clamp_max(config.importance_weight_cap)


def within_mask_bounds(tokens: LossTokens, config: LossConfig) -> torch.Tensor | None:
    """Return [T] bool: mask_low <= p / p_behaviour <= mask_high; None without a mask.

    `token`: IcePop (Ling team 2025, "Every Step Evolves", 2510.18855), on both sides for any sign
    of the advantage. `sequence`: the product over the sequence (masked importance sampling, Liu, Li
    et al. 2025, see `importance_weights`). `geometric`: the geometric mean, which does not grow
    with the length (Li, Liu et al. 2025, "Trust Region Masking for Long-Horizon LLM RL",
    2512.23075, and verl's rollout correction).
    """
    log_ratios_T = (tokens.logprobs_T - tokens.behaviour_T).detach()
    if config.mask == "none":
        return None
    if config.mask == "sequence":
        log_ratios_T = tokens.sequence_sum(log_ratios_T)
    elif config.mask == "geometric":
        log_ratios_T = tokens.sequence_mean(log_ratios_T)
    # Compare logarithms, because the product over a long sequence overflows.
    low, high = math.log(config.mask_low), math.log(config.mask_high)
    return (log_ratios_T >= low) & (log_ratios_T <= high)


def aggregate(
    terms_T: torch.Tensor, tokens: LossTokens, totals: StepTotals, config: LossConfig
) -> tuple[torch.Tensor, int]:
    """Return terms [T] and a divisor: the sum of these terms, divided by the divisor, is this
    part's share of the step's scalar. ``terms_T`` must be 0 for untrained tokens.

    `token_mean`: every token of the step counts the same (DAPO: Yu et al. 2025, 2503.14476).
    `sequence_mean`: every sequence counts the same (GRPO: Shao et al. 2024, 2402.03300).
    `constant`: a sequence's sum is divided by ``constant_length`` instead of its length, so that
    long wrong answers are not favoured (Dr. GRPO: Liu et al. 2025, 2503.20783).
    """
    match config.aggregation:
        case "token_mean":
            return terms_T, totals.num_tokens
        case "sequence_mean":
            return terms_T / tokens.sequence_lengths(), totals.num_sequences
        case "constant":
            return terms_T, totals.num_sequences * config.constant_length
