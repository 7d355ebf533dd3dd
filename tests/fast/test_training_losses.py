"""Losses and logprobs against values worked out by hand, finite differences and plain torch."""

from __future__ import annotations

import math

import pytest
import torch

import torchtitan_rl.training.logprobs as logprobs_module
from torchtitan_rl.config import LossConfig
from torchtitan_rl.training.logprobs import selected_logprobs
from torchtitan_rl.training.losses import LossOutput, cross_entropy_loss, policy_loss

CONFIG = LossConfig(clip_low=0.2, clip_high=0.28)


def loss_of(
    ratios: list[float],
    advantages: list[float],
    trained: list[bool] | None = None,
    *,
    num_trained: int | None = None,
    config: LossConfig = CONFIG,
) -> tuple[LossOutput, torch.Tensor]:
    """The loss where policy and behaviour differ by these ratios, and the policy's logprobs."""
    behaviour = torch.full((len(ratios),), -1.5)
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    on = torch.tensor([True] * len(ratios) if trained is None else trained)
    output = policy_loss(
        logprobs,
        behaviour,
        torch.tensor(advantages),
        on,
        num_trained=num_trained or int(on.sum()),
        config=config,
    )
    return output, logprobs


def test_on_policy_the_gradient_is_the_advantage() -> None:
    output, logprobs = loss_of([1.0, 1.0], [2.0, -1.0])
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 0.5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.5, 2.0, -1.28 * 2.0, False),  # better and already likelier: clipped above
        (1.2, 2.0, -1.2 * 2.0, True),  # below the high clip
        (0.5, 2.0, -0.5 * 2.0, True),  # better but less likely: not clipped
        (0.5, -2.0, 0.8 * 2.0, False),  # worse and already less likely: clipped below
        (1.5, -2.0, 1.5 * 2.0, True),  # worse but likelier: not clipped
    ],
)
def test_clipping_is_one_sided_with_a_bound_of_its_own_for_each_side(
    ratio: float, advantage: float, loss: float, moves: bool
) -> None:
    output, logprobs = loss_of([ratio], [advantage])
    output.loss.backward()
    assert logprobs.grad is not None
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    assert bool(logprobs.grad[0] != 0.0) is moves
    assert output.sums["clip_share"].item() == (0 if moves else 1)
    assert output.sums["clip_share_high"].item() == int(not moves and advantage > 0)
    assert output.sums["clip_share_low"].item() == int(not moves and advantage < 0)


def test_the_ratio_is_anchored_on_the_samplers_logprobs() -> None:
    """Trap 24: with recomputed logprobs as the anchor the ratio would be 1 and nothing clipped."""
    output, _ = loss_of([2.0, 0.25], [1.0, 1.0])
    assert output.sums["ratio_mean"].item() == pytest.approx(2.25)
    assert output.maxima["ratio_max"].item() == pytest.approx(2.0)
    assert output.maxima["logprob_diff_max"].item() == pytest.approx(math.log(4))
    assert output.sums["logprob_diff_mean"].item() == pytest.approx(math.log(2) + math.log(4))
    assert output.sums["kl_k1"].item() == pytest.approx(math.log(4) - math.log(2))
    k3 = (2.0 - 1 - math.log(2)) + (0.25 - 1 + math.log(4))
    assert output.sums["kl_k3"].item() == pytest.approx(k3)


def test_masked_tokens_are_never_read_not_even_their_nans() -> None:
    behaviour = torch.tensor([-1.0, math.nan, -math.inf])
    logprobs = torch.tensor([-1.0, -2.0, math.nan], requires_grad=True)
    advantages = torch.tensor([1.0, math.nan, 7.0])
    trained = torch.tensor([True, False, False])
    output = policy_loss(logprobs, behaviour, advantages, trained, num_trained=1, config=CONFIG)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0]
    assert all(math.isfinite(v.item()) for v in [*output.sums.values(), *output.maxima.values()])


def test_log_ratios_are_clamped_before_the_exponential_and_counted() -> None:
    logprobs = torch.tensor([-1.0, -200.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-200.0, -1.0, -1.0])
    output = policy_loss(
        logprobs,
        behaviour,
        torch.tensor([-1.0, 1.0, 1.0]),
        torch.tensor([True] * 3),
        num_trained=3,
        config=CONFIG,
    )
    output.loss.backward()
    assert output.sums["clamped_log_ratio"].item() == 2
    assert output.maxima["ratio_max"].item() == pytest.approx(math.exp(20.0), rel=1e-5)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_any_split_of_the_tokens_gives_the_same_loss_and_gradient() -> None:
    torch.manual_seed(0)
    behaviour = -torch.rand(12)
    advantages = torch.randn(12)
    trained = torch.rand(12) > 0.3
    start = behaviour + 0.4 * torch.randn(12)

    def gradient(parts: list[slice]) -> tuple[float, torch.Tensor]:
        logprobs = start.clone().requires_grad_()
        total = 0.0
        for part in parts:
            output = policy_loss(
                logprobs[part],
                behaviour[part],
                advantages[part],
                trained[part],
                num_trained=int(trained.sum()),
                config=CONFIG,
            )
            output.loss.backward()
            total += output.loss.item()
        assert logprobs.grad is not None
        return total, logprobs.grad

    whole_loss, whole = gradient([slice(0, 12)])
    split_loss, split = gradient([slice(0, 1), slice(1, 7), slice(7, 12)])
    assert split_loss == pytest.approx(whole_loss, abs=1e-6)
    assert torch.allclose(whole, split, atol=1e-7)


def test_the_policy_gradient_agrees_with_finite_differences() -> None:
    torch.manual_seed(1)
    behaviour = -torch.rand(8, dtype=torch.float64)
    advantages = torch.randn(8, dtype=torch.float64)
    trained = torch.tensor([True] * 7 + [False])
    logprobs = (behaviour + 0.2 * torch.randn(8, dtype=torch.float64)).requires_grad_()

    def loss(values: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            values, behaviour, advantages, trained, num_trained=7, config=CONFIG
        ).loss

    assert torch.autograd.gradcheck(loss, (logprobs,), eps=1e-6)


def test_cross_entropy_is_the_mean_negative_logprob_over_the_mask() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -9.0], requires_grad=True)
    output = cross_entropy_loss(logprobs, torch.tensor([True, True, False]), num_trained=2)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(1.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.5, 0.0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [1 << 24, 40])
def test_selected_logprobs_equal_log_softmax_at_the_sampling_temperature(
    temperature: float, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 25: the trainer divides logits by the temperature that was sampled at."""
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = (3 * torch.randn(9, 11)).requires_grad_()
    targets = torch.randint(0, 11, (9,))
    upstream = torch.randn(9)
    expected = (logits / temperature).log_softmax(-1)
    (wanted,) = torch.autograd.grad(
        (expected.gather(1, targets[:, None])[:, 0] * upstream).sum(), logits
    )
    logprobs, entropy = selected_logprobs(logits, targets, temperature=temperature)
    (found,) = torch.autograd.grad((logprobs * upstream).sum(), logits)
    assert torch.allclose(logprobs, expected.gather(1, targets[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert not entropy.requires_grad


def test_logits_in_bfloat16_are_normalized_in_float32() -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, 300)).to(torch.bfloat16)
    targets = torch.randint(0, 300, (5,))
    logprobs, _ = selected_logprobs(logits, targets)
    expected = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, expected, atol=1e-6)


def test_a_token_that_is_masked_out_of_the_vocabulary_leaves_the_entropy_finite() -> None:
    _, entropy = selected_logprobs(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]))
    assert entropy.tolist() == pytest.approx([math.log(2)])
