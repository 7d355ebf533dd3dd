"""Log-ratios of the policy: against which proximal policy, of a token or of a sequence.

All functions take cleaned tokens and return [T], 0 where a token is not trained on.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch

from torchtitan_rl.training.losses.tokens import LossTokens

ProximalPolicy = Literal["behaviour", "recomputed", "interpolated"]


def proximal_logprobs(tokens: LossTokens, proximal_policy: ProximalPolicy) -> torch.Tensor:
    """Logprobs that the clipped ratio is taken against; they carry no gradient.

    `behaviour`: those that the tokens were sampled with (PPO: Schulman et al. 2017, 1707.06347).

    The others are the proximal policy of decoupled PPO (Hilton et al. 2021, 2110.00641; for
    language models AReaL, Fu et al. 2025, 2505.24298), so that the trust region is about the
    trainer's own step and `truncated_weights` corrects for who sampled. `recomputed`: the weights
    before this step. The trainer takes one step a batch, so that those are the weights of this very
    forward pass, and its logprobs, detached, are what a pass before the step would return; the
    ratio is then 1 and nothing is ever clipped. `interpolated`: `interpolated_logprobs`.
    """
    match proximal_policy:
        case "behaviour":
            return tokens.behaviour_T
        case "recomputed":
            return tokens.logprobs_T.detach()
        case "interpolated":
            return interpolated_logprobs(tokens)
        case _:
            assert_never(proximal_policy)


def interpolated_logprobs(tokens: LossTokens) -> torch.Tensor:
    """The policy of one version before the current one, between behaviour and current by age d:

    log p_prox = log p_behaviour + (d - 1) / d x (log p - log p_behaviour), d >= 1.

    From AReaL's prox_approx document, alpha = (v_prox - v_behave) / (v - v_behave) with
    v_prox = v - 1, and A-3PO (Li et al. 2025, 2512.06547). At d = 1 it is the behaviour policy; at
    d = 0 nothing lies between, and it is the current one.
    """
    difference_T = tokens.logprobs_T.detach() - tokens.behaviour_T
    share_T = 1.0 - 1.0 / tokens.ages_T.clamp_min(1).to(difference_T.dtype)
    share_T = torch.where(tokens.ages_T > 0, share_T, torch.ones_like(share_T))
    return tokens.behaviour_T + share_T * difference_T


def sequence_log_ratios(log_ratios_T: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
    """GSPO's log-ratio: its value is the mean over the sequence, s = (p(y) / p_prox(y))^(1/|y|);
    its gradient is each token's own.

    From Zheng et al. 2025 (2507.18071), section 4.3 (GSPO-token), which is GSPO where a sequence
    has one advantage and allows one per token.
    """
    own_T = log_ratios_T - log_ratios_T.detach()
    return tokens.sequence_mean(log_ratios_T.detach()) + own_T
