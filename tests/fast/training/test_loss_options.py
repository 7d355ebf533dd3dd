"""Each option of the policy loss against hand-computed values; properties of all of them."""

from __future__ import annotations

import dataclasses
import doctest
import math
from typing import Literal

import pytest
import torch

from tests.support.loss_tokens import loss_of, make_tokens, totals_of
from torchtitan_rl.training import losses
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses import LossTokens, policy_loss
from torchtitan_rl.training.losses.policy import proximal_logprobs


def published_methods() -> dict[str, LossConfig]:
    """The methods of the example in the docstring of `losses`, which is run."""
    (example,) = (test for test in doctest.DocTestFinder().find(losses) if test.examples)
    assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
    methods: dict[str, LossConfig] = example.globs["methods"]
    return methods


METHODS = published_methods()
OPTIONS = METHODS | {
    "sequence weights": LossConfig(
        proximal_policy="recomputed", importance_weight="sequence", surrogate="cispo"
    ),
    "sequence mask, k1": LossConfig(mask="sequence", kl_coefficient=0.1, kl_estimator="k1"),
    "k2": LossConfig(kl_coefficient=0.1, kl_estimator="k2"),
}


def test_truncated_importance_sampling_weighs_tokens_by_their_capped_ratio() -> None:
    config = LossConfig(
        proximal_policy="recomputed", importance_weight="token", importance_weight_cap=2.0
    )
    output, gradient = loss_of(make_tokens([3.0, 0.5, 1.0], [1.0, 1.0, -2.0]), config)
    assert output.loss.item() == pytest.approx(-(2.0 + 0.5 - 2.0) / 3)
    assert gradient == pytest.approx([-2.0 / 3, -0.5 / 3, 2.0 / 3])
    assert output.sums["weight_mean"].item() == pytest.approx(3.5)
    assert output.sums["weight_capped_share"].item() == 1
    assert output.sums["clip_share"].item() == 0  # the proximal policy is the policy itself


def test_sequence_weights_are_the_capped_product_of_the_sequences_ratios() -> None:
    config = LossConfig(
        proximal_policy="recomputed", importance_weight="sequence", importance_weight_cap=4.0
    )
    tokens = make_tokens([2.0, 0.5, 1.5, 3.0, 2.0], [1.0] * 5, sequences=[0, 1, 0, 1, 2])
    _, gradient = loss_of(tokens, config)  # products: 3 for 0, 1.5 for 1, 2 for 2
    assert gradient == pytest.approx([-3.0 / 5, -1.5 / 5, -3.0 / 5, -1.5 / 5, -2.0 / 5])
    _, capped = loss_of(tokens, dataclasses.replace(config, importance_weight_cap=1.6))
    assert capped == pytest.approx([-1.6 / 5, -1.5 / 5, -1.6 / 5, -1.5 / 5, -1.6 / 5])


def test_icepop_masks_tokens_on_both_sides_whatever_the_advantage() -> None:
    config = LossConfig(
        proximal_policy="recomputed",
        importance_weight="token",
        importance_weight_cap=5.0,
        mask="token",
    )
    ratios, advantages = [0.4, 0.6, 4.0, 6.0, 0.4, 6.0], [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    output, gradient = loss_of(make_tokens(ratios, advantages), config)
    assert gradient == pytest.approx([0.0, -0.6 / 6, -4.0 / 6, 0.0, 0.0, 0.0])
    assert output.sums["masked_share"].item() == 4


def test_a_sequence_mask_reads_the_product_and_a_geometric_one_the_mean_ratio() -> None:
    # Products 1.44 and 0.5; geometric means 1.2 and 0.707.
    tokens = make_tokens([1.2, 1.2, 1.0, 0.5], [1.0] * 4, sequences=[0, 0, 1, 1])
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    product = LossConfig(mask="sequence", mask_low=0.4, mask_high=1.3, **wide)
    assert loss_of(tokens, product)[1] == pytest.approx([0.0, 0.0, -1.0 / 4, -0.5 / 4])
    mean = LossConfig(mask="geometric", mask_low=0.8, mask_high=1.3, **wide)
    output, gradient = loss_of(tokens, mean)
    assert gradient == pytest.approx([-1.2 / 4, -1.2 / 4, 0.0, 0.0])
    assert output.sums["masked_share"].item() == 2


def test_a_geometric_mask_does_not_grow_with_the_length_and_never_overflows() -> None:
    tokens = make_tokens([1.1] * 20_000, [1.0] * 20_000, sequences=[0] * 20_000)
    kept, _ = loss_of(tokens, LossConfig(mask="geometric", mask_low=0.8, mask_high=1.2))
    masked, _ = loss_of(tokens, LossConfig(mask="sequence", mask_low=0.1, mask_high=100.0))
    assert kept.sums["masked_share"].item() == 0
    assert masked.sums["masked_share"].item() == 20_000


def test_the_interpolated_policy_is_one_version_before_the_current_one() -> None:
    """Ages 0 to 4: shares 1, 0, 1/2, 2/3, 3/4 of the way from behaviour to policy."""
    tokens = make_tokens([math.e] * 5, [1.0] * 5, ages=[0, 1, 2, 3, 4])
    proximal_T = proximal_logprobs(tokens, LossConfig(proximal_policy="interpolated"))
    way = proximal_T - tokens.behaviour_T
    assert way.tolist() == pytest.approx([1.0, 0.0, 1 / 2, 2 / 3, 3 / 4])
    assert not way.requires_grad


def test_decoupled_ppo_clips_against_the_proximal_policy_and_weighs_by_the_rest() -> None:
    config = LossConfig(
        proximal_policy="interpolated", importance_weight="token", importance_weight_cap=3.0
    )
    # Age 2, policy / behaviour 4: both ratio and weight are 2; age 1: ratio 1.44, weight 1.
    tokens = make_tokens([4.0, 4.0, 1.44], [1.0, -1.0, -1.0], ages=[2, 2, 1])
    output, gradient = loss_of(tokens, config)
    assert output.loss.item() == pytest.approx(-(1.28 * 2.0 - 2.0 * 2.0 - 1.44) / 3)
    assert gradient == pytest.approx([0.0, 4.0 / 3, 1.44 / 3])
    assert output.sums["weight_mean"].item() == pytest.approx(5.0)


def test_in_a_later_update_the_proximal_policy_is_that_of_the_weights_before_the_step() -> None:
    """policy / behaviour 3, before / behaviour 2: the ratio is 1.5 and clipped, the weight is 2."""
    tokens = make_tokens([3.0, 3.0, 3.0], [1.0, -1.0, 1.0], ages=[0, 1, 2])
    before_T = tokens.behaviour_T + math.log(2.0)
    tokens = dataclasses.replace(tokens, before_T=before_T)
    recomputed = LossConfig(
        proximal_policy="recomputed", importance_weight="token", importance_weight_cap=3.0
    )
    output, gradient = loss_of(tokens, recomputed)
    assert output.loss.item() == pytest.approx(-2.0 * (1.28 - 1.5 + 1.28) / 3)
    assert gradient == pytest.approx([0.0, 2.0 * 1.5 / 3, 0.0])
    interpolated = dataclasses.replace(recomputed, proximal_policy="interpolated")
    way_T = proximal_logprobs(tokens, interpolated) - tokens.behaviour_T
    assert way_T.tolist() == pytest.approx([math.log(2.0), 0.0, math.log(2.0) / 2])


def test_cispo_bounds_the_weight_and_keeps_every_tokens_gradient() -> None:
    config = LossConfig(surrogate="cispo", clip_low=0.2, clip_high=0.28)
    tokens = make_tokens([1.5, 1.1, 0.5, 0.5], [1.0, 1.0, 1.0, -1.0])
    output, gradient = loss_of(tokens, config)
    assert gradient == pytest.approx([-1.28 / 4, -1.1 / 4, -0.8 / 4, 0.8 / 4])
    logprobs = tokens.logprobs_T.tolist()
    weighted = [1.28 * logprobs[0], 1.1 * logprobs[1], 0.8 * logprobs[2], -0.8 * logprobs[3]]
    assert output.loss.item() == pytest.approx(-sum(weighted) / 4)
    assert output.sums["clip_share_high"].item() == 1
    assert output.sums["clip_share_low"].item() == 2


def test_gspo_clips_whole_sequences_by_their_geometric_mean_ratio() -> None:
    config = LossConfig(ratio="sequence", aggregation="sequence_mean", clip_low=0.2, clip_high=0.28)
    # Means: (2 x 0.72)^(1/2) = 1.2, whose product would be clipped; (2 x 2)^(1/2) = 2, clipped;
    # 0.5 alone, not clipped.
    tokens = make_tokens([2.0, 0.72, 2.0, 2.0, 0.5], [1.0] * 5, sequences=[0, 0, 1, 1, 2])
    output, gradient = loss_of(tokens, config)
    assert output.loss.item() == pytest.approx(-(1.2 + 1.28 + 0.5) / 3)
    # s A / (sequences x length) each, as in GSPO's gradient.
    assert gradient == pytest.approx([-1.2 / 6, -1.2 / 6, 0.0, 0.0, -0.5 / 3])
    assert output.sums["clip_share"].item() == 2


@pytest.mark.parametrize(("ratio", "advantage"), [(3.0, 1.0), (0.1, -1.0)])
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_untrained_tokens_of_a_sequence_are_not_counted_as_clipped_or_masked(
    surrogate: Literal["clip", "cispo"], ratio: float, advantage: float
) -> None:
    config = LossConfig(surrogate=surrogate, ratio="sequence", mask="geometric", mask_high=2.0)
    tokens = make_tokens([ratio, 1.0], [advantage] * 2, trained=[True, False], sequences=[0, 0])
    output, _ = loss_of(tokens, config)
    assert output.sums["clip_share"].item() == 1
    assert output.sums["masked_share"].item() == 1


def test_aggregations_count_tokens_sequences_or_a_constant_length() -> None:
    tokens = make_tokens([1.0] * 4, [1.0, 1.0, 1.0, 5.0], sequences=[0, 0, 0, 1])
    mean = loss_of(tokens, LossConfig(aggregation="token_mean"))[0]
    assert mean.loss.item() == pytest.approx(-(3.0 + 5.0) / 4)
    sequence = loss_of(tokens, LossConfig(aggregation="sequence_mean"))[0]
    assert sequence.loss.item() == pytest.approx(-(3.0 / 3 + 5.0) / 2)
    constant = loss_of(tokens, LossConfig(aggregation="constant", constant_length=10))[0]
    assert constant.loss.item() == pytest.approx(-(3.0 / 10 + 5.0 / 10) / 2)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # policy / reference is 2, d = log 2; the advantage is 0, the coefficient 0.5
        ("k1", math.log(2), 0.5 * math.log(2)),  # in the advantage: 0.5 d x grad of log p
        ("k2", math.log(2) ** 2 / 2, 0.5 * math.log(2)),  # d
        ("k3", 0.5 - 1 + math.log(2), 0.5 * (1 - 0.5)),  # 1 - exp(-d)
    ],
)
def test_kl_to_the_reference_pulls_back_what_became_likelier(
    estimator: str, value: float, gradient: float
) -> None:
    config = LossConfig(kl_coefficient=0.5, kl_estimator=estimator)  # type: ignore[arg-type]
    output, found = loss_of(make_tokens([1.0], [0.0], reference_ratios=[2.0]), config)
    assert output.sums["kl_reference"].item() == pytest.approx(value)
    assert output.loss.item() == pytest.approx(0.5 * value)
    assert found == pytest.approx([gradient])
    less_likely = make_tokens([1.0], [0.0], reference_ratios=[0.5])
    assert loss_of(less_likely, config)[1][0] < 0.0


def random_tokens(size: int = 24) -> LossTokens:
    """Four sequences of different lengths, one of them without a trained token."""
    torch.manual_seed(0)
    tokens = make_tokens(
        (0.4 * torch.randn(size)).exp().tolist(),
        torch.randn(size).tolist(),
        trained=[i % 5 != 0 and i < 20 for i in range(size)],
        ages=[i % 6 for i in range(size)],
        sequences=[0] * 3 + [1] * 9 + [2] * 8 + [3] * (size - 20),
        reference_ratios=(0.3 * torch.randn(size)).exp().tolist(),
    )
    before_T = tokens.logprobs_T.detach() + 0.3 * torch.randn(size)
    return dataclasses.replace(tokens, before_T=before_T)


def part_of(tokens: LossTokens, part: slice) -> LossTokens:
    pieces = {field.name: getattr(tokens, field.name)[part] for field in dataclasses.fields(tokens)}
    sequences = torch.unique(pieces["sequences_T"], return_inverse=True)[1]
    return dataclasses.replace(tokens, **pieces | {"sequences_T": sequences})


@pytest.mark.parametrize("name", OPTIONS)
def test_any_split_that_keeps_sequences_whole_gives_the_same_loss_gradient_and_metrics(
    name: str,
) -> None:
    tokens = random_tokens()
    whole, gradient = loss_of(tokens, OPTIONS[name])
    parts = [part_of(tokens, part) for part in (slice(0, 12), slice(12, 20), slice(20, 24))]
    outputs = [policy_loss(part, totals=totals_of(tokens), config=OPTIONS[name]) for part in parts]
    loss = torch.stack([output.loss for output in outputs]).sum()
    (found,) = torch.autograd.grad(loss, tokens.logprobs_T)
    assert loss.item() == pytest.approx(whole.loss.item())
    assert found.tolist() == pytest.approx(gradient)
    for key, total in whole.sums.items():
        added = torch.stack([output.sums[key] for output in outputs]).sum(0)
        torch.testing.assert_close(added, total)
    for key, largest in whole.maxima.items():
        found_max = torch.stack([output.maxima[key] for output in outputs]).amax(0)
        torch.testing.assert_close(found_max, largest)


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_that_are_not_trained_are_never_read_not_even_their_nans(name: str) -> None:
    tokens = random_tokens()
    clean, gradient = loss_of(tokens, OPTIONS[name])
    broken = {
        field: torch.where(tokens.trained_T, getattr(tokens, field).detach(), math.nan)
        for field in ("logprobs_T", "behaviour_T", "advantages_T", "reference_T", "before_T")
    }
    broken["logprobs_T"].requires_grad_()
    broken["ages_T"] = torch.where(tokens.trained_T, tokens.ages_T, 1_000)
    output, found = loss_of(dataclasses.replace(tokens, **broken), OPTIONS[name])
    assert output.loss.item() == clean.loss.item()
    assert found == gradient
    for key, total in clean.sums.items():
        assert torch.equal(output.sums[key], total), key
    for key, largest in clean.maxima.items():
        assert torch.equal(output.maxima[key], largest), key


@pytest.mark.parametrize("name", OPTIONS)
def test_on_policy_every_option_raises_good_tokens_and_lowers_bad_ones(name: str) -> None:
    tokens = make_tokens([1.0, 1.0], [1.0, -1.0], reference_ratios=[1.0, 1.0])
    _, gradient = loss_of(tokens, OPTIONS[name])
    assert gradient[0] < 0.0 < gradient[1]
    assert gradient[0] == pytest.approx(-gradient[1])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_part_without_trained_tokens_adds_nothing(name: str) -> None:
    tokens = make_tokens([2.0], [1.0], trained=[False], reference_ratios=[2.0])
    output = policy_loss(tokens, totals=totals_of(random_tokens()), config=OPTIONS[name])
    assert output.loss.item() == 0.0
    assert all(total.count_nonzero() == 0 for total in output.sums.values())
    assert all(largest.count_nonzero() == 0 for largest in output.maxima.values())
