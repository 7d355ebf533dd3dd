"""Episodes put into one batch; first-fit-decreasing packing of sizes.

Invariant: every episode is whole in the batch or listed in `Packing.oversized`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchtitan_rl.generation.kept_tokens import WHOLE_VOCABULARY
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.types import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """``batch`` is None if no episode fits a row; ``oversized`` are the indices of episodes longer
    than a row, which the caller counts as discarded."""

    batch: TrainingBatch | None
    oversized: tuple[int, ...]


def pack_episodes(episodes: Sequence[Episode], *, row_len: int, temperature: float) -> Packing:
    """One batch of all episodes of at most ``row_len`` tokens, in their order.

    Raises:
        ValueError: an episode has no tokens, or fields of different lengths.
    """
    for index, episode in enumerate(episodes):
        _check(index, episode)
    oversized = tuple(i for i, one in enumerate(episodes) if len(one.token_ids) > row_len)
    fitting = [one for one in episodes if len(one.token_ids) <= row_len]
    if not fitting:
        return Packing(batch=None, oversized=oversized)
    kept, kept_sets = _kept(fitting)
    batch = TrainingBatch(
        episode_lengths=np.array([len(one.token_ids) for one in fitting]),
        token_ids=np.concatenate([np.array(one.token_ids, dtype=np.int64) for one in fitting]),
        loss_mask=np.concatenate([np.array(one.loss_mask, dtype=np.bool_) for one in fitting]),
        logprobs=np.concatenate([np.array(one.logprobs, dtype=np.float32) for one in fitting]),
        advantages=np.concatenate([np.array(one.advantages, dtype=np.float32) for one in fitting]),
        versions=np.concatenate([np.array(one.versions, dtype=np.int64) for one in fitting]),
        temperature=temperature,
        kept=kept,
        kept_sets=kept_sets,
        groups=np.unique([one.group_id for one in fitting], return_inverse=True)[1],
    )
    return Packing(batch=batch, oversized=oversized)


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


def _kept(episodes: Sequence[Episode]) -> tuple[npt.NDArray[np.int32] | None, tuple[bytes, ...]]:
    """`TrainingBatch.kept` and the distinct sets of the episodes' trained tokens."""
    if not any(one.kept_tokens for one in episodes):
        return None, ()
    numbers = {WHOLE_VOCABULARY: -1}
    kept: list[int] = []
    for one in episodes:
        if not one.kept_tokens:
            kept += [-1] * len(one.token_ids)
            continue
        for packed, trained in zip(one.kept_tokens, one.loss_mask, strict=True):
            if trained and packed is not None:
                kept.append(numbers.setdefault(packed, len(numbers) - 1))
            else:
                kept.append(-1)
    return np.array(kept, dtype=np.int32), tuple(numbers)[1:]


def _check(index: int, episode: Episode) -> None:
    sizes = {
        len(field)
        for field in (
            episode.token_ids,
            episode.loss_mask,
            episode.logprobs,
            episode.advantages,
            episode.versions,
            episode.kept_tokens or episode.token_ids,
        )
    }
    if sizes == {0} or len(sizes) > 1:
        raise ValueError(
            f"episode {index} of rollout {episode.rollout_id}: its fields must have one length, "
            f"above 0, not {sorted(sizes)}"
        )
