"""Which loss configurations are refused, and what the message says."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from torchtitan_rl.config import LossConfig
from torchtitan_rl.training.loss_mistakes import loss_mistakes
from torchtitan_rl.validation_fields import field_errors


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"surrogate": "cispo", "clip_low": 0.99},
        {"ratio": "sequence", "aggregation": "sequence_mean"},
        {"anchor": "recomputed", "weight": "token"},
        {"anchor": "recomputed", "weight": "token", "weight_cap": 5.0, "mask": "token"},
        {"anchor": "interpolated", "weight": "sequence", "ratio": "sequence"},
        {"mask": "geometric", "mask_low": 0.99, "mask_high": 1.01},
        {"aggregation": "constant", "constant_length": 256, "kl_coefficient": 0.01},
    ],
    ids=str,
)
def test_published_methods_are_not_refused(fields: dict[str, Any]) -> None:
    assert loss_mistakes(LossConfig(**fields), staleness=2) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": "token"}, "weight is token: .*correct twice; give none, or anchor recomputed"),
        ({"weight": "sequence", "surrogate": "cispo"}, "weight is sequence: .*correct twice"),
        ({"anchor": "recomputed"}, "anchor is recomputed: .*nothing corrects.*give weight token"),
        ({"anchor": "interpolated"}, "anchor is interpolated: .*nothing corrects"),
    ],
    ids=str,
)
def test_correcting_twice_or_not_at_all_is_refused(fields: dict[str, Any], message: str) -> None:
    """Trap 24: no truncated weight on a ratio that has it, and no recomputed anchor without one."""
    (mistake,) = loss_mistakes(LossConfig(**fields), staleness=2)
    assert re.match(rf"trainer\.loss\.{message}", mistake), mistake


def test_an_interpolated_anchor_is_refused_where_all_tokens_are_of_one_version() -> None:
    config = LossConfig(anchor="interpolated", weight="token")
    assert loss_mistakes(config, staleness=1) == []
    (mistake,) = loss_mistakes(config, staleness=0)
    assert mistake.startswith("trainer.loss.anchor is interpolated: with schedule.staleness 0")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"weight_cap": 0.5}, "weight_cap is 0.5"),
        ({"weight_cap": math.inf}, "weight_cap is inf"),
        ({"mask_low": 0.0}, "mask_low is 0.0"),
        ({"mask_low": 1.5}, "mask_low is 1.5"),
        ({"mask_high": 0.9}, "mask_high is 0.9"),
        ({"mask_high": math.nan}, "mask_high is nan"),
        ({"aggregation": "constant"}, "constant_length is 0"),
        ({"constant_length": 100}, "constant_length is 100"),
        ({"kl_coefficient": -0.1}, "kl_coefficient is -0.1"),
        ({"kl_coefficient": math.nan}, "kl_coefficient is nan"),
        ({"anchor": "recomputed", "weight": "token", "ratio": "sequence"}, "ratio is sequence"),
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused_with_the_fix(
    fields: dict[str, Any], field: str
) -> None:
    config = LossConfig(**fields)
    alone = field_errors(config, "trainer.loss.").values()
    (mistake,) = [*alone, *loss_mistakes(config, staleness=2)]
    assert mistake.startswith(f"trainer.loss.{field}: ")
    assert "give" in mistake
