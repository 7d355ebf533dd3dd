"""What the sides of the training benchmark are given, and what it comes to."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

from benchmarks.training_work import (
    MEDIAN_LENGTH,
    draw_episodes,
    draw_lengths,
    one_row_each,
    pack,
    padding_shares,
    step_flops,
)
from torchtitan_rl.training.splitting import trained_mask

ROW_LEN = 1024


def test_lengths_are_log_normal_and_fit_a_row():
    lengths = draw_lengths(np.random.default_rng(0), 5000, ROW_LEN)
    assert median(lengths) == pytest.approx(MEDIAN_LENGTH, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(0.7, rel=0.05)
    assert min(lengths) >= 8
    assert max(lengths) == ROW_LEN


def test_packed_and_padded_rows_have_the_same_tokens_to_train_on():
    episodes = draw_episodes(np.random.default_rng(0), 40, ROW_LEN, vocab_size=256)
    packed, padded = pack(episodes, ROW_LEN), one_row_each(episodes, ROW_LEN)
    assert padded.token_ids.shape == (40, ROW_LEN)
    assert len(packed.token_ids) < 20
    assert packed.num_tokens == padded.num_tokens
    assert packed.num_episodes == padded.num_episodes == 40
    tokens = [np.sort(batch.token_ids[trained_mask(batch)]) for batch in (packed, padded)]
    np.testing.assert_array_equal(*tokens)
    # The first third of each episode is its prompt.
    assert len(tokens[0]) == pytest.approx(packed.num_tokens * 2 / 3, rel=0.01)


@pytest.mark.parametrize("count", [512, 1024, 2048])
def test_at_most_three_percent_of_a_large_step_is_padding(count):
    assert max(padding_shares(count, ROW_LEN, draws=20)) <= 0.03


def test_padding_is_what_the_packed_rows_have():
    packed = pack(draw_episodes(np.random.default_rng(0), 64, ROW_LEN, vocab_size=256), ROW_LEN)
    assert padding_shares(64, ROW_LEN, draws=1) == [pytest.approx(packed.padding_share)]


def test_flops_of_two_documents():
    """1,000 weights in layers for 30 tokens, 50 in the head for 6; attention: two products of
    n x n x 8, a multiplication and an addition each, three times, and half of it."""
    flops = step_flops(
        [10, 20], 6, num_layer_parameters=1000, num_head_parameters=50, attention_width=8
    )
    weights = 6 * (30 * 1000 + 6 * 50)
    attention = 3 * (2 * 2 * 8) * (10**2 + 20**2) / 2
    assert flops == weights + attention
