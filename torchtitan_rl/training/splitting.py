"""One batch -> the shares of data-parallel ranks -> microbatches.

All ranks get the same number of rows, and the same sizes of microbatches, because each forward
and backward is a collective; rows of padding fill up. A row's loss does not depend on where it
lands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_rl.training.batch import TrainingBatch

_PADDING = {"document_ids": -1, "versions": -1}  # other fields are padded with 0


def pad_rows(batch: TrainingBatch, multiple: int) -> TrainingBatch:
    """Append rows of padding until their number is a multiple of ``multiple``."""
    num_rows, row_len = batch.token_ids.shape
    missing = -num_rows % multiple
    if missing == 0:
        return batch
    padding: dict[str, Any] = {
        name: np.full((missing, row_len), _PADDING.get(name, 0), rows.dtype)
        for name, rows in _row_fields(batch).items()
    }
    padding["position_ids"][:] = np.arange(row_len)
    return _map_rows(batch, lambda name, rows: np.concatenate([rows, padding[name]]))


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
    """[R, L], True on tokens that have a token of the same document before them."""
    mask: npt.NDArray[np.bool_] = (batch.document_ids >= 0) & (batch.position_ids > 0)
    return mask


def trained_mask(batch: TrainingBatch) -> npt.NDArray[np.bool_]:
    """[R, L], True on tokens that the policy loss reads: sampled, with a finite logprob."""
    finite: npt.NDArray[np.bool_] = np.isfinite(batch.logprobs)
    return finite & batch.loss_mask & predicted_mask(batch)


def num_masked_nonfinite(batch: TrainingBatch) -> int:
    """Sampled tokens kept out of the loss because their behaviour logprob is not finite."""
    return int((batch.loss_mask & predicted_mask(batch) & ~np.isfinite(batch.logprobs)).sum())


def sequence_ids(batch: TrainingBatch) -> npt.NDArray[np.int64]:
    """[R, L]: a number for each document of the batch, that no other has; -1 on padding."""
    num_rows, row_len = batch.document_ids.shape
    first = row_len * np.arange(num_rows, dtype=np.int64)[:, None]
    return np.where(batch.document_ids >= 0, first + batch.document_ids, -1)


def num_sequences(batch: TrainingBatch) -> int:
    """Documents with at least one token where ``loss_mask`` holds."""
    return len(np.unique(sequence_ids(batch)[batch.loss_mask]))


def _rows(batch: TrainingBatch, which: slice) -> TrainingBatch:
    return _map_rows(batch, lambda _, rows: rows[which])


def _map_rows(
    batch: TrainingBatch, change: Callable[[str, npt.NDArray[Any]], npt.NDArray[Any]]
) -> TrainingBatch:
    changed: dict[str, Any] = {
        name: change(name, rows) for name, rows in _row_fields(batch).items()
    }
    return replace(batch, **changed)


def _row_fields(batch: TrainingBatch) -> dict[str, npt.NDArray[Any]]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
