"""Which loss configurations are refused, and what the message says."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from torchtitan_rl.config.checks.fields import field_errors
from torchtitan_rl.config.checks.loss import loss_errors
from torchtitan_rl.training.config import LossConfig


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"surrogate": "cispo", "clip_low": 0.99},
        {"ratio": "sequence", "aggregation": "sequence_mean"},
        {"proximal_policy": "recomputed", "importance_weight": "token"},
        {
            "proximal_policy": "recomputed",
            "importance_weight": "token",
            "importance_weight_cap": 5.0,
            "mask": "token",
        },
        {"proximal_policy": "interpolated", "importance_weight": "sequence", "ratio": "sequence"},
        {"mask": "geometric", "mask_low": 0.99, "mask_high": 1.01},
        {"aggregation": "constant", "constant_length": 256, "kl_coefficient": 0.01},
    ],
    ids=str,
)
def test_published_methods_are_not_refused(fields: dict[str, Any]) -> None:
    assert loss_errors(LossConfig(**fields), staleness=2) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"importance_weight": "token"},
            "importance_weight is token: .*correct twice; give none, or",
        ),
        (
            {"importance_weight": "sequence", "surrogate": "cispo"},
            "importance_weight is sequence: .*correct twice",
        ),
        (
            {"proximal_policy": "recomputed"},
            "proximal_policy is recomputed: .*nothing corrects.*give importance_weight token",
        ),
        (
            {"proximal_policy": "interpolated"},
            "proximal_policy is interpolated: .*nothing corrects",
        ),
    ],
    ids=str,
)
def test_correcting_twice_or_not_at_all_is_refused(fields: dict[str, Any], expected: str) -> None:
    """Trap 24: no truncated weight on a ratio that has it, and no recomputed proximal policy
    without one."""
    (message,) = loss_errors(LossConfig(**fields), staleness=2)
    assert re.match(rf"trainer\.loss\.{expected}", message), message


def test_an_interpolated_proximal_policy_is_refused_where_all_tokens_are_of_one_version() -> None:
    config = LossConfig(proximal_policy="interpolated", importance_weight="token")
    assert loss_errors(config, staleness=1) == []
    (message,) = loss_errors(config, staleness=0)
    assert message.startswith(
        "trainer.loss.proximal_policy is interpolated: with schedule.staleness 0"
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"importance_weight_cap": 0.5}, "importance_weight_cap is 0.5"),
        ({"importance_weight_cap": math.inf}, "importance_weight_cap is inf"),
        ({"mask_low": 0.0}, "mask_low is 0.0"),
        ({"mask_low": 1.5}, "mask_low is 1.5"),
        ({"mask_high": 0.9}, "mask_high is 0.9"),
        ({"mask_high": math.nan}, "mask_high is nan"),
        ({"aggregation": "constant"}, "constant_length is 0"),
        ({"constant_length": 100}, "constant_length is 100"),
        ({"kl_coefficient": -0.1}, "kl_coefficient is -0.1"),
        ({"kl_coefficient": math.nan}, "kl_coefficient is nan"),
        (
            {"proximal_policy": "recomputed", "importance_weight": "token", "ratio": "sequence"},
            "ratio is sequence",
        ),
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused_with_the_fix(
    fields: dict[str, Any], field: str
) -> None:
    config = LossConfig(**fields)
    alone = field_errors(config, "trainer.loss.").values()
    (message,) = [*alone, *loss_errors(config, staleness=2)]
    assert message.startswith(f"trainer.loss.{field}: ")
    assert "give" in message
