"""DPO's pairs of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from torchtitan_rl.training.batch import TrainingBatch, trained_mask
from torchtitan_rl.training.preference import halves_of


def batch(signs: list[float], groups: list[int]) -> TrainingBatch:
    """One episode of three tokens, the last two sampled, for each sign."""
    size = len(signs)
    return TrainingBatch(
        episode_lengths=np.full(size, 3),
        token_ids=np.arange(3 * size),
        loss_mask=np.tile([False, True, True], size),
        logprobs=np.full(3 * size, -1.0, dtype=np.float32),
        advantages=np.repeat(np.float32(signs), 3),
        versions=np.zeros(3 * size, dtype=np.int64),
        temperature=1.0,
        groups=np.array(groups),
    )


def halves(one: TrainingBatch) -> list[int]:
    return halves_of(one, trained_mask(one)).tolist()


def test_a_half_is_all_episodes_of_one_sign_in_a_group() -> None:
    assert halves(batch([-1, 1, 1, -1, -1], [7, 7, 2, 2, 2])) == [3, 2, 0, 1, 1]


def test_an_update_has_only_the_pairs_of_its_groups() -> None:
    whole = batch([-1, 1, 1, -1], [7, 7, 2, 2])
    masked = replace(whole, loss_mask=whole.loss_mask & (np.arange(12) < 6))
    assert halves(masked) == [1, 0, -1, -1]


@pytest.mark.parametrize(
    ("signs", "groups"),
    [([1, 1], [0, 0]), ([1, -1, -1], [0, 0, 1]), ([1, -1, 0], [0, 0, 0])],
    ids=["no rejected one", "half a pair", "neither"],
)
def test_what_is_no_pair_is_refused(signs: list[float], groups: list[int]) -> None:
    with pytest.raises(ValueError, match="a group is no pair of rollouts"):
        halves(batch(signs, groups))
