"""What the sides of the training benchmark are given, and what it comes to."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.training_work import WORKLOADS, pack
from torchtitan_rl.training.batch import TrainingBatch, trained_mask
from torchtitan_rl.training.packing import Share, rank_share


def share_of(batch: TrainingBatch, *, on: bool) -> Share:
    return rank_share(
        batch,
        trained_mask(batch),
        max_tokens=100_000,
        padding_multiple=1,
        share_prefixes=on,
        rank=0,
        num_ranks=1,
    )


UNSHARED = (64 * 252, 16 * 1099, 48 * 495)
SHARED = (8 * (205 + 8 * 47), 1000 + 16 * 99, 2 * (205 + 8 * (240 + 3 * 50)))


@pytest.mark.parametrize(
    ("name", "unshared", "shared"), list(zip(WORKLOADS, UNSHARED, SHARED, strict=False))
)
def test_workloads_share_what_they_say(name: str, unshared: int, shared: int) -> None:
    """Without the last token of an episode, which nothing comes after."""
    batch = pack(WORKLOADS[name](np.random.default_rng(0), 256))
    assert share_of(batch, on=False).num_computed == unshared
    assert share_of(batch, on=True).num_computed == pytest.approx(shared, abs=16)
