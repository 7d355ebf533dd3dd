"""One batch split over data-parallel ranks and microbatches; which of its tokens are trained on.

All ranks get the same number of rows and the same sizes of microbatches, since each forward and
backward pass is a collective; rows of padding fill up. A row's loss does not depend on where it is.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_rl.training.batch import TrainingBatch, empty_rows


def pad_rows(batch: TrainingBatch, multiple: int) -> TrainingBatch:
    """Append rows of padding until their number is a multiple of ``multiple``."""
    num_rows, row_len = batch.token_ids.shape
    missing = -num_rows % multiple
    if missing == 0:
        return batch
    padding = _row_fields(empty_rows(missing, row_len, temperature=batch.temperature))
    padded: dict[str, Any] = {
        name: np.concatenate([rows, padding[name]]) for name, rows in _row_fields(batch).items()
    }
    return replace(batch, **padded)


def rank_share(batch: TrainingBatch, rank: int, num_ranks: int) -> TrainingBatch:
    """Rows ``rank, rank + num_ranks, ...``: the first rows are the fullest, so ranks interleave.

    Raises:
        ValueError: the rows do not divide evenly.
    """
    if len(batch.token_ids) % num_ranks:
        raise ValueError(f"{len(batch.token_ids)} rows do not divide among {num_ranks} ranks")
    return _rows(batch, slice(rank, None, num_ranks))


def microbatches(batch: TrainingBatch, rows_per_microbatch: int) -> list[TrainingBatch]:
    """Consecutive rows; the last microbatch may have fewer."""
    return [
        _rows(batch, slice(start, start + rows_per_microbatch))
        for start in range(0, len(batch.token_ids), rows_per_microbatch)
    ]


def predicted_mask(batch: TrainingBatch) -> npt.NDArray[np.bool_]:
    """[R, L], True on tokens that follow another token of their document."""
    mask: npt.NDArray[np.bool_] = (batch.document_ids >= 0) & (batch.position_ids > 0)
    return mask


def trained_mask(batch: TrainingBatch) -> npt.NDArray[np.bool_]:
    """[R, L], True on tokens that the policy loss reads: sampled, with a finite logprob."""
    finite: npt.NDArray[np.bool_] = np.isfinite(batch.logprobs)
    return finite & batch.loss_mask & predicted_mask(batch)


def num_masked_nonfinite(batch: TrainingBatch) -> int:
    """Number of sampled tokens without loss because their behaviour logprob is not finite."""
    return int((batch.loss_mask & predicted_mask(batch) & ~np.isfinite(batch.logprobs)).sum())


def sequence_ids(batch: TrainingBatch) -> npt.NDArray[np.int64]:
    """[R, L]: a number that is unique to each document of the batch; -1 on padding."""
    num_rows, row_len = batch.document_ids.shape
    first = row_len * np.arange(num_rows, dtype=np.int64)[:, None]
    return np.where(batch.document_ids >= 0, first + batch.document_ids, -1)


def num_sequences(batch: TrainingBatch) -> int:
    """Number of documents with at least one token in ``loss_mask``."""
    return len(np.unique(sequence_ids(batch)[batch.loss_mask]))


def _rows(batch: TrainingBatch, which: slice) -> TrainingBatch:
    chosen: dict[str, Any] = {name: rows[which] for name, rows in _row_fields(batch).items()}
    return replace(batch, **chosen)


def _row_fields(batch: TrainingBatch) -> dict[str, npt.NDArray[Any]]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
