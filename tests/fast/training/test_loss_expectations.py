"""Exact expected gradients: every outcome of a small policy, weighted by its probability."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import pytest
import torch

from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses import LossTokens, StepTotals, policy_loss

VOCAB = 3
LENGTH = 2
BEHAVIOUR = torch.tensor([[0.3, -0.2, 0.1], [-0.4, 0.5, 0.0]], dtype=torch.float64)
SEQUENCES = list(itertools.product(range(VOCAB), repeat=LENGTH))
REWARDS = torch.tensor([1.0, -0.5, 0.2, 0.0, 2.0, -1.0, 0.7, 0.3, -0.4], dtype=torch.float64)


def logprobs_of(logits_LV: torch.Tensor) -> torch.Tensor:
    """[sequences, L] under a policy whose positions are independent."""
    logprobs_LV = logits_LV.log_softmax(-1)
    tokens = torch.tensor(SEQUENCES)
    return torch.stack([logprobs_LV[i, tokens[:, i]] for i in range(LENGTH)], dim=1)


def expected_gradient(config: LossConfig, logits_LV: torch.Tensor, age: int) -> torch.Tensor:
    """Gradient of minus the loss over all sequences, weighted by the behaviour probability."""
    logits_LV = logits_LV.clone().requires_grad_()
    behaviour_NL = logprobs_of(BEHAVIOUR)
    probability_N = behaviour_NL.sum(1).exp()
    tokens = LossTokens(
        logprobs_T=logprobs_of(logits_LV).flatten(),
        behaviour_T=behaviour_NL.flatten(),
        advantages_T=(REWARDS * probability_N).repeat_interleave(LENGTH),
        trained_T=torch.ones(len(SEQUENCES) * LENGTH, dtype=torch.bool),
        ages_T=torch.full((len(SEQUENCES) * LENGTH,), age),
        sequences_T=torch.arange(len(SEQUENCES)).repeat_interleave(LENGTH),
    )
    totals = StepTotals(num_tokens=1, num_sequences=1)
    loss = policy_loss(tokens, totals=totals, config=config).loss
    return -torch.autograd.grad(loss, logits_LV)[0]


def true_gradient(logits_LV: torch.Tensor) -> torch.Tensor:
    """Gradient of the expected reward under the policy itself."""
    logits_LV = logits_LV.clone().requires_grad_()
    reward = (logprobs_of(logits_LV).sum(1).exp() * REWARDS).sum()
    return torch.autograd.grad(reward, logits_LV)[0]


MOVED = BEHAVIOUR + torch.tensor([[0.8, 0.0, -0.6], [0.0, -0.9, 0.7]], dtype=torch.float64)
UNCAPPED = LossConfig(
    proximal_policy="recomputed", importance_weight="sequence", importance_weight_cap=1e9
)


def test_sequence_weights_give_the_true_gradient_from_samples_of_another_policy() -> None:
    found = expected_gradient(UNCAPPED, MOVED, age=3)
    torch.testing.assert_close(found, true_gradient(MOVED))


def test_without_a_correction_the_gradient_is_wrong() -> None:
    """Trap 24, which `loss_errors` refuses: a recomputed proximal policy without weights."""
    found = expected_gradient(dataclasses.replace(UNCAPPED, importance_weight="none"), MOVED, age=3)
    assert not torch.allclose(found, true_gradient(MOVED), rtol=0.1)


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        LossConfig(surrogate="cispo"),
        UNCAPPED,
        LossConfig(
            proximal_policy="recomputed",
            importance_weight="token",
            importance_weight_cap=2.0,
            mask="token",
        ),
        LossConfig(proximal_policy="interpolated", importance_weight="token", mask="geometric"),
    ],
    ids=["default", "cispo", "sequence tis", "icepop", "decoupled"],
)
@pytest.mark.parametrize("age", [0, 2])
def test_on_policy_every_token_level_option_gives_the_true_gradient(
    config: LossConfig, age: int
) -> None:
    found = expected_gradient(config, BEHAVIOUR, age)
    torch.testing.assert_close(found, true_gradient(BEHAVIOUR))


@pytest.mark.parametrize(
    ("estimator", "is_exact"),
    [("k1", True), ("k2", True), ("k3", False)],
)
def test_k1_and_k2_have_the_gradient_of_the_kl_itself_and_k3_that_of_its_reverse(
    estimator: Literal["k1", "k2", "k3"], is_exact: bool
) -> None:
    """One token sampled from (0.5, 0.3, 0.2): ten samples are exact."""
    samples: Sequence[int] = [0] * 5 + [1] * 3 + [2] * 2
    logits_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    reference_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logprobs_T = logits_V.log_softmax(-1)[samples]
    tokens = LossTokens(
        logprobs_T=logprobs_T,
        behaviour_T=logprobs_T.detach(),
        advantages_T=torch.zeros(10, dtype=torch.float64),
        trained_T=torch.ones(10, dtype=torch.bool),
        ages_T=torch.zeros(10, dtype=torch.int64),
        sequences_T=torch.arange(10),
        reference_T=reference_V[samples],
    )
    loss = policy_loss(
        tokens,
        totals=StepTotals(num_tokens=10, num_sequences=10),
        config=LossConfig(kl_coefficient=1.0, kl_estimator=estimator),
    ).loss
    (found,) = torch.autograd.grad(loss, logits_V)
    policy_V = logits_V.log_softmax(-1)
    if is_exact:
        kl = (policy_V.exp() * (policy_V - reference_V)).sum()
    else:
        kl = (reference_V.exp() * (reference_V - policy_V)).sum()
    torch.testing.assert_close(found, torch.autograd.grad(kl, logits_V)[0])
