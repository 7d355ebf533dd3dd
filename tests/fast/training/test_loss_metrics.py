"""Metrics of the loss by age, and the totals of a step."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.loss_tokens import loss_of, make_tokens
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses import loss_metrics


def test_each_age_has_its_own_ratio_clipping_masking_kl_difference_and_effective_share() -> None:
    tokens = make_tokens(
        [1.0, 3.0, 1.5, 6.0, 0.4, 9.0],
        [1.0, -1.0, 1.0, 1.0, -1.0, 1.0],
        trained=[True] * 5 + [False],
        ages=[0, 0, 1, 3, 7, 0],
    )
    output, _ = loss_of(tokens, LossConfig(mask="token"))
    metrics = loss_metrics(output.sums, output.maxima, num_trained=5)
    expected = {
        "age_0/tokens": 2,
        "age_0/ratio_mean": 2.0,
        "age_0/ratio_max": 3.0,
        "age_0/clip_share": 0.0,
        "age_0/masked_share": 0.0,
        "age_0/kl_k3": (3.0 - 1.0 - 1.0986123) / 2,
        "age_0/logprob_diff_mean": math.log(3.0) / 2,  # of the token that did not change: 0
        "age_0/logprob_diff_max": math.log(3.0),
        "age_3plus/logprob_diff_max": math.log(6.0),
        "age_0/effective_share": 4.0**2 / (2 * 10.0),
        "age_1/clip_share": 1.0,
        "age_1/effective_share": 1.0,
        "age_3plus/tokens": 2,
        "age_3plus/ratio_mean": 3.2,
        "age_3plus/ratio_max": 6.0,
        "age_3plus/clip_share": 1.0,
        "age_3plus/masked_share": 1.0,
        "effective_share": 11.9**2 / (5 * (1 + 9 + 2.25 + 36 + 0.16)),
        "masked_share": 2 / 5,
        "clip_share": 3 / 5,
        "ratio_mean": 11.9 / 5,
        "ratio_max": 6.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_ratios_that_underflow_leave_no_effective_sample() -> None:
    output, _ = loss_of(make_tokens([1e-200], [1.0]), LossConfig(max_log_ratio=1000.0))
    assert loss_metrics(output.sums, output.maxima, num_trained=1)["effective_share"] == 0.0


def test_sums_become_means_over_trained_tokens_but_for_loss_and_counts() -> None:
    sums = {name: torch.tensor(6.0) for name in ("entropy", "loss", "clamped_log_ratio")}
    metrics = loss_metrics(sums, {"ratio_max": torch.tensor(2.0)}, num_trained=3)
    assert metrics == {"entropy": 2.0, "loss": 6.0, "clamped_log_ratio": 6.0, "ratio_max": 2.0}
