"""Minibatches of a batch: whole groups, the same on every rank and in a resumed run."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.turns import rollout, turn
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.training.batch import TrainingBatch, trained_mask
from torchtitan_rl.training.packing import minibatches, pack_episodes


def batch_of(sizes: list[int]) -> TrainingBatch:
    """Groups with so many episodes."""
    episodes = [
        episode
        for group, size in enumerate(sizes)
        for index in range(size)
        for episode in rollout_to_episodes(
            rollout(turn([1, 2], [3] * (1 + index)), rollout_id=f"g{group}/r{index}"), 1.0
        )
    ]
    batch = pack_episodes(episodes, row_len=64, temperature=1.0).batch
    assert batch is not None
    return batch


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 14), st.integers(0, 5))
def test_minibatches_are_whole_groups_of_about_one_number_and_each_token_is_in_one(
    sizes: list[int], number: int, version: int
):
    batch = batch_of(sizes)
    selected = trained_mask(batch)
    parts = minibatches(batch, selected, number, seed=(7, version))
    assert len(parts) == min(number, len(sizes))
    assert np.array_equal(np.sum(parts, axis=0), selected.astype(int))
    groups = [set(batch.groups[batch.episode_ids[part]].tolist()) for part in parts]
    assert sum(map(len, groups)) == len(sizes)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    again = minibatches(batch, selected, number, seed=(7, version))
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_groups_without_a_token_to_train_on_have_no_minibatch():
    batch = batch_of([1, 1, 1])
    selected = trained_mask(batch) & (batch.episode_ids == 2)
    (part,) = minibatches(batch, selected, 3, seed=(0, 0))
    assert np.array_equal(part, selected)
