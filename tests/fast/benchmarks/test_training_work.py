"""What the sides of the training benchmark are given, and what it comes to."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.training_work import WORKLOADS, alone, fitting, num_visible_pairs, pack, step_flops
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


def test_episodes_that_share_nothing_have_log_normal_lengths() -> None:
    batch = pack(alone(np.random.default_rng(0), 256))
    assert batch.num_episodes == 128
    assert np.log(batch.episode_lengths).std() == pytest.approx(0.7, rel=0.15)
    assert share_of(batch, on=True).shared_share < 0.02


def test_visible_pairs_are_those_within_nodes_and_from_answers_to_prompts() -> None:
    batch = pack(WORKLOADS["8 x 8 answers of 48 to prompts of 205"](np.random.default_rng(0), 256))
    pairs = num_visible_pairs(share_of(batch, on=True).parts)
    expected = 8 * (205 * 206 / 2 + 8 * 47 * 48 / 2 + 8 * 47 * 205)
    assert pairs == pytest.approx(expected, rel=0.01)


def test_flops_of_two_documents() -> None:
    """1,000 weights in layers for 30 tokens, 50 in the head for 6; attention on 250 pairs: two
    products of 8, a multiplication and an addition each, three times."""
    flops = step_flops(
        30, 6, 250, num_layer_parameters=1000, num_head_parameters=50, attention_width=8
    )
    assert flops == 6 * (30 * 1000 + 6 * 50) + 3 * (2 * 2 * 8) * 250


def test_workloads_that_fit_no_row_are_named_and_none_at_all_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "8 x 8 answers of 48 to prompts of 205"
    found = fitting(WORKLOADS, vocab_size=256, row_lens=[100, 300])
    assert list(found) == [name]
    assert "left out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no workload fits into rows of 100 tokens"):
        fitting(WORKLOADS, vocab_size=256, row_lens=[100])
