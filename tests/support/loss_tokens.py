"""Small tensors for the tests of the losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses import LossOutput, LossTokens, StepTotals, policy_loss


def make_tokens(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    trained: Sequence[bool] | None = None,
    ages: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
    reference_ratios: Sequence[float] | None = None,
) -> LossTokens:
    """Tokens whose policy / behaviour, and policy / reference, are these ratios; by default all
    trained, of age 0, and each a sequence of its own."""
    behaviour = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    logprobs = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    reference = None
    if reference_ratios is not None:
        reference = logprobs - torch.tensor(reference_ratios, dtype=torch.float64).log()
    return LossTokens(
        logprobs_T=logprobs.requires_grad_(),
        behaviour_T=behaviour,
        advantages_T=torch.tensor(advantages, dtype=torch.float64),
        trained_T=torch.tensor([True] * len(ratios) if trained is None else list(trained)),
        ages_T=torch.tensor([0] * len(ratios) if ages is None else list(ages)),
        sequences_T=torch.tensor(list(range(len(ratios))) if sequences is None else sequences),
        reference_T=reference,
    )


def totals_of(tokens: LossTokens) -> StepTotals:
    """Of a step that has no other tokens."""
    return StepTotals(
        num_tokens=int(tokens.trained_T.sum()),
        num_sequences=len(tokens.sequences_T[tokens.trained_T].unique()),
    )


def loss_of(
    tokens: LossTokens, config: LossConfig, totals: StepTotals | None = None
) -> tuple[LossOutput, list[float]]:
    """The loss, and its gradient with respect to each logprob."""
    output = policy_loss(tokens, totals=totals or totals_of(tokens), config=config)
    (gradient_T,) = torch.autograd.grad(output.loss, tokens.logprobs_T)
    return output, gradient_T.tolist()
