"""Packing and splitting: no token is lost or misplaced."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.training import packing
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.packing import first_fit_decreasing, pack_episodes
from torchtitan_rl.training.splitting import (
    microbatches,
    num_masked_nonfinite,
    num_sequences,
    pad_rows,
    rank_share,
    sequence_ids,
    trained_mask,
)
from torchtitan_rl.types import Episode

ROW_LEN = 16


def make_episode(length: int, *, first_token: int = 0, prompt: int = 1) -> Episode:
    mask = tuple(i >= prompt for i in range(length))
    return Episode(
        rollout_id=f"rollout-{first_token}",
        group_id="group",
        token_ids=tuple(range(first_token, first_token + length)),
        loss_mask=mask,
        logprobs=tuple(-0.5 - i if on else 0.0 for i, on in enumerate(mask)),
        advantages=tuple(0.25 if on else 0.0 for on in mask),
        versions=tuple(3 if on else -1 for on in mask),
    )


def make_batch(lengths: list[int], *, rows_multiple: int = 1) -> TrainingBatch:
    episodes = [make_episode(n, first_token=100 * i) for i, n in enumerate(lengths)]
    batch = pack_episodes(
        episodes, row_len=ROW_LEN, temperature=0.7, rows_multiple=rows_multiple
    ).batch
    assert batch is not None
    return batch


def documents(batch: TrainingBatch) -> list[tuple[int, ...]]:
    """Token ids of every document, in order of its first token."""
    found = []
    for tokens, ids in zip(batch.token_ids, batch.document_ids, strict=True):
        found += [tuple(tokens[ids == document].tolist()) for document in set(ids[ids >= 0])]
    return sorted(found)


lengths_lists = st.lists(st.integers(1, ROW_LEN + 4), min_size=1, max_size=30)


@given(lengths=lengths_lists, rows_multiple=st.integers(1, 5))
def test_every_episode_is_whole_in_one_row_or_listed_as_oversized(
    lengths: list[int], rows_multiple: int
) -> None:
    """Trap 20: an oversized episode is reported and never dropped silently."""
    episodes = [make_episode(n, first_token=100 * i) for i, n in enumerate(lengths)]
    packed = pack_episodes(episodes, row_len=ROW_LEN, temperature=0.7, rows_multiple=rows_multiple)
    assert packed.oversized == tuple(i for i, n in enumerate(lengths) if n > ROW_LEN)
    fitting = [e for e in episodes if len(e.token_ids) <= ROW_LEN]
    if packed.batch is None:
        assert not fitting
        return
    assert documents(packed.batch) == [e.token_ids for e in fitting]
    assert packed.batch.num_episodes == len(fitting)
    assert len(packed.batch.token_ids) % rows_multiple == 0


@given(lengths=lengths_lists)
def test_token_fields_stay_aligned_with_their_tokens(lengths: list[int]) -> None:
    episodes = [make_episode(n, first_token=100 * i, prompt=2) for i, n in enumerate(lengths)]
    batch = pack_episodes(episodes, row_len=ROW_LEN, temperature=0.7).batch
    if batch is None:
        return
    for r, i in zip(*np.nonzero(batch.document_ids >= 0), strict=True):
        index, position = divmod(int(batch.token_ids[r, i]), 100)
        episode = episodes[index]
        assert batch.position_ids[r, i] == position
        assert batch.loss_mask[r, i] == episode.loss_mask[position]
        assert batch.logprobs[r, i] == np.float32(episode.logprobs[position])
        assert batch.advantages[r, i] == episode.advantages[position]
        assert batch.versions[r, i] == episode.versions[position]


@given(lengths=lengths_lists)
def test_documents_start_exactly_where_positions_are_zero(lengths: list[int]) -> None:
    episodes = [make_episode(n) for n in lengths]
    batch = pack_episodes(episodes, row_len=ROW_LEN, temperature=1.0, rows_multiple=3).batch
    if batch is None:
        return
    before = np.pad(batch.document_ids, ((0, 0), (1, 0)), constant_values=-2)[:, :-1]
    assert np.array_equal(batch.position_ids == 0, batch.document_ids != before)


@given(lengths=st.lists(st.integers(1, ROW_LEN), min_size=1, max_size=40))
def test_first_fit_decreasing_fills_rows_without_overflow(lengths: list[int]) -> None:
    bins = first_fit_decreasing(lengths, ROW_LEN)
    assert sorted(i for row in bins for i in row) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in row) for row in bins]
    assert max(totals) <= ROW_LEN
    # Two rows that are at most half full would fit into one.
    assert sum(2 * total <= ROW_LEN for total in totals) <= 1


def test_packing_is_deterministic_and_prefers_the_longest_first() -> None:
    assert doctest.testmod(packing) == (0, 1)  # failed, attempted


def test_an_episode_with_fields_of_different_lengths_is_refused() -> None:
    broken = Episode(
        rollout_id="r7",
        group_id="g",
        token_ids=(1, 2),
        loss_mask=(False,),
        logprobs=(0.0, 0.0),
        advantages=(0.0, 0.0),
        versions=(-1, -1),
    )
    with pytest.raises(ValueError, match="rollout r7"):
        pack_episodes([broken], row_len=8, temperature=1.0)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, ROW_LEN), min_size=1, max_size=30),
    ranks=st.integers(1, 4),
    rows=st.integers(1, 4),
)
def test_ranks_and_microbatches_share_the_rows_without_loss(
    lengths: list[int], ranks: int, rows: int
) -> None:
    batch = make_batch(lengths)
    padded = pad_rows(batch, ranks)
    parts = [microbatches(rank_share(padded, rank, ranks), rows) for rank in range(ranks)]
    sizes = [[len(part.token_ids) for part in share] for share in parts]
    assert all(size == sizes[0] for size in sizes)
    found = [d for share in parts for part in share for d in documents(part)]
    assert sorted(found) == documents(batch)
    # This is how the trainer gathers rows back.
    back = np.stack([np.concatenate([p.token_ids for p in share]) for share in parts], axis=1)
    assert np.array_equal(back.reshape(-1, ROW_LEN), padded.token_ids)


def test_rows_of_padding_hold_no_document_and_no_loss() -> None:
    batch = pad_rows(make_batch([16]), 3)
    assert batch.token_ids.shape == (3, ROW_LEN)
    assert (batch.document_ids[1:] == -1).all()
    assert not batch.loss_mask[1:].any()
    assert batch.padding_share == pytest.approx(2 / 3)


def test_rows_that_do_not_divide_among_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="1 rows do not divide among 2 ranks"):
        rank_share(make_batch([4]), 0, 2)


def test_tokens_with_nonfinite_behaviour_logprobs_are_masked_and_counted() -> None:
    """Trap 15: invalid logprobs are never trained on as if on-policy."""
    batch = make_batch([6])
    batch.logprobs[0, 2] = np.nan
    batch.logprobs[0, 4] = -np.inf
    batch.logprobs[0, 9] = np.nan  # padding does not count
    assert num_masked_nonfinite(batch) == 2
    assert np.nonzero(trained_mask(batch)[0])[0].tolist() == [1, 3, 5]


def test_the_first_token_of_a_document_is_never_trained_on() -> None:
    episodes = [make_episode(4, prompt=0), make_episode(3, prompt=0)]
    batch = pack_episodes(episodes, row_len=8, temperature=1.0).batch
    assert batch is not None
    assert trained_mask(batch)[0].tolist() == [False, True, True, True, False, True, True, False]


def test_every_sequence_of_a_batch_has_a_unique_number() -> None:
    batch = make_batch([5, 3, 8, 2, 6])
    ids = sequence_ids(batch)
    real = batch.document_ids >= 0
    assert len(np.unique(ids[real])) == 5
    assert (ids[~real] == -1).all()
    lengths = sorted(np.unique(ids[real], return_counts=True)[1].tolist())
    assert lengths == [2, 3, 5, 6, 8]


def test_sequences_without_a_trained_token_do_not_count() -> None:
    batch = make_batch([5, 3, 8])
    batch.loss_mask[(batch.document_ids == batch.document_ids[0, 0])] = False
    assert 0 < num_sequences(batch) < 3
    batch.loss_mask[:] = False
    assert num_sequences(batch) == 0
