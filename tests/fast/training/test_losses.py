"""The default policy loss and cross-entropy against hand-computed values."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.support.loss_tokens import loss_of, make_tokens, totals_of
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses import StepTotals, cross_entropy_loss, policy_loss

CONFIG = LossConfig(clip_low=0.2, clip_high=0.28)


def test_on_policy_the_gradient_is_the_advantage() -> None:
    output, gradient = loss_of(make_tokens([1.0, 1.0], [2.0, -1.0]), CONFIG)
    assert output.loss.item() == pytest.approx(-0.5)
    assert gradient == pytest.approx([-1.0, 0.5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.5, 2.0, -1.28 * 2.0, False),  # better and more likely than before: clipped above
        (1.2, 2.0, -1.2 * 2.0, True),  # below the upper bound
        (0.5, 2.0, -0.5 * 2.0, True),  # better but less likely: not clipped
        (0.5, -2.0, 0.8 * 2.0, False),  # worse and less likely than before: clipped below
        (1.5, -2.0, 1.5 * 2.0, True),  # worse but more likely: not clipped
    ],
)
def test_clipping_is_one_sided_with_a_separate_bound_for_each_side(
    ratio: float, advantage: float, loss: float, moves: bool
) -> None:
    output, gradient = loss_of(make_tokens([ratio], [advantage]), CONFIG)
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    assert bool(gradient[0] != 0.0) is moves
    assert output.sums["clip_share"].item() == (0 if moves else 1)
    assert output.sums["clip_share_high"].item() == int(not moves and advantage > 0)
    assert output.sums["clip_share_low"].item() == int(not moves and advantage < 0)


def test_the_ratio_is_taken_against_the_logprobs_of_sampling() -> None:
    """Trap 24: with a recomputed proximal policy the ratio would be 1 and nothing clipped."""
    output, _ = loss_of(make_tokens([2.0, 0.25], [1.0, 1.0]), CONFIG)
    assert output.sums["clip_share"].item() == 1
    assert output.sums["ratio_mean"].item() == pytest.approx(2.25)
    assert output.maxima["ratio_max"].item() == pytest.approx(2.0)
    assert output.maxima["logprob_diff_max"].item() == pytest.approx(math.log(4))
    assert output.sums["logprob_diff_mean"].item() == pytest.approx(math.log(2) + math.log(4))
    assert output.sums["kl_k1"].item() == pytest.approx(math.log(4) - math.log(2))
    k3 = (2.0 - 1 - math.log(2)) + (0.25 - 1 + math.log(4))
    assert output.sums["kl_k3"].item() == pytest.approx(k3)


def test_log_ratios_are_clamped_before_the_exponential_and_counted() -> None:
    tokens = dataclasses.replace(
        make_tokens([1.0] * 3, [-1.0, 1.0, 1.0]),
        logprobs_T=torch.tensor([-1.0, -200.0, -1.0], requires_grad=True),
        behaviour_T=torch.tensor([-200.0, -1.0, -1.0]),
        advantages_T=torch.tensor([-1.0, 1.0, 1.0]),
    )
    output, gradient = loss_of(tokens, CONFIG)
    assert output.sums["clamped_log_ratio"].item() == 2
    assert output.maxima["ratio_max"].item() == pytest.approx(math.exp(20.0), rel=1e-5)
    assert gradient[:2] == [0.0, 0.0]
    assert gradient[2] == pytest.approx(-1 / 3)


def test_the_policy_gradient_agrees_with_finite_differences() -> None:
    torch.manual_seed(1)
    ratios = (0.2 * torch.randn(8, dtype=torch.float64)).exp().tolist()
    tokens = make_tokens(
        ratios, torch.randn(8).tolist(), trained=[True] * 7 + [False], sequences=[0, 0, 0, 1] * 2
    )

    def loss(values: torch.Tensor) -> torch.Tensor:
        moved = dataclasses.replace(tokens, logprobs_T=values)
        return policy_loss(moved, totals=totals_of(tokens), config=CONFIG).loss

    assert torch.autograd.gradcheck(loss, (tokens.logprobs_T,), eps=1e-6)


def test_the_loss_is_divided_by_the_tokens_of_the_whole_step() -> None:
    tokens = make_tokens([1.0, 1.0], [2.0, -1.0])
    output, _ = loss_of(tokens, CONFIG, StepTotals(num_tokens=10, num_sequences=5))
    assert output.loss.item() == pytest.approx(-0.1)


def test_cross_entropy_is_the_mean_negative_logprob_over_the_mask() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -9.0], requires_grad=True)
    output = cross_entropy_loss(logprobs, torch.tensor([True, True, False]), num_trained=2)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(1.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.5, 0.0]
