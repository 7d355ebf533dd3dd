"""Packing of episodes into rows of one length, first-fit-decreasing.

Invariants: every episode is in exactly one row or in `Packing.oversized`, and none is cut; the
result depends only on the order and lengths of the episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_rl.training.batch import TrainingBatch, empty_rows
from torchtitan_rl.types import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """``batch`` is None if no episode fits a row; ``oversized`` are the indices of episodes longer
    than a row, which the caller counts as discarded."""

    batch: TrainingBatch | None
    oversized: tuple[int, ...]


def pack_episodes(
    episodes: Sequence[Episode], *, row_len: int, temperature: float, rows_multiple: int = 1
) -> Packing:
    """Pack episodes into rows of ``row_len`` tokens, with rows of padding up to a multiple of
    ``rows_multiple``.

    Raises:
        ValueError: an episode has no tokens, or fields of different lengths.
    """
    for index, episode in enumerate(episodes):
        _check(index, episode)
    lengths = [len(episode.token_ids) for episode in episodes]
    oversized = tuple(i for i, length in enumerate(lengths) if length > row_len)
    fitting = [i for i, length in enumerate(lengths) if length <= row_len]
    if not fitting:
        return Packing(batch=None, oversized=oversized)
    rows = first_fit_decreasing([lengths[i] for i in fitting], row_len)
    laid_out = [[episodes[fitting[i]] for i in row] for row in rows]
    laid_out += [[] for _ in range(-len(rows) % rows_multiple)]
    return Packing(batch=_lay_out(laid_out, row_len, temperature), oversized=oversized)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices into ``lengths``, each with a total of at most ``capacity``, longest first.

    Needs at most 11/9 of the optimal number of bins, plus one (Johnson 1973).

    >>> first_fit_decreasing([3, 9, 7, 6, 7], 16)
    [[1, 2], [4, 3, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    free = np.full(len(lengths), capacity, dtype=np.int64)
    bins: list[list[int]] = []
    for i in order:
        # A bin that is not open yet has its full capacity, so a first fit always exists.
        first = int(np.argmax(free >= lengths[i]))
        if first >= len(bins):
            bins.append([])
        bins[first].append(i)
        free[first] -= lengths[i]
    return bins


def _check(index: int, episode: Episode) -> None:
    sizes = {
        len(field)
        for field in (
            episode.token_ids,
            episode.loss_mask,
            episode.logprobs,
            episode.advantages,
            episode.versions,
        )
    }
    if sizes == {0} or len(sizes) > 1:
        raise ValueError(
            f"episode {index} of rollout {episode.rollout_id}: its fields must have one length, "
            f"above 0, not {sorted(sizes)}"
        )


def _lay_out(rows: list[list[Episode]], row_len: int, temperature: float) -> TrainingBatch:
    batch = empty_rows(
        len(rows), row_len, temperature=temperature, num_episodes=sum(len(row) for row in rows)
    )
    for r, row in enumerate(rows):
        start = 0
        for document, episode in enumerate(row):
            span = slice(start, start + len(episode.token_ids))
            batch.token_ids[r, span] = episode.token_ids
            batch.document_ids[r, span] = document
            batch.position_ids[r, span] = np.arange(len(episode.token_ids))
            batch.loss_mask[r, span] = episode.loss_mask
            batch.logprobs[r, span] = episode.logprobs
            batch.advantages[r, span] = episode.advantages
            batch.versions[r, span] = episode.versions
            start = span.stop
        batch.position_ids[r, start:] = np.arange(row_len - start)
    return batch
