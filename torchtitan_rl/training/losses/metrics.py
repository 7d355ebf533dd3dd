"""Totals of `LossOutput.sums` and `.maxima` over a step -> its metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchtitan_rl.training.losses.age_metrics import age_metrics

_COUNTS = ("loss", "clamped_log_ratio")  # sums that are no means over trained tokens
_BY_AGE = "by_age"


def loss_metrics(
    sums: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor], *, num_trained: int
) -> dict[str, float]:
    """Values by name, as in the table of metrics; totals over all parts of the step come in."""
    metrics = {
        name: total.item() if name in _COUNTS else total.item() / num_trained
        for name, total in sums.items()
        if name != _BY_AGE
    }
    metrics |= {name: total.item() for name, total in maxima.items() if name != _BY_AGE}
    if _BY_AGE in sums:
        metrics |= age_metrics(sums[_BY_AGE].tolist(), maxima[_BY_AGE].tolist())
    return metrics
