"""Packed rows of episodes: what the controller sends to the trainer, in numpy, and its answer.

Shapes: R rows, L tokens per row. The tokens of a row are documents (episodes), one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One optimizer step. Entry ``[r, i]`` describes token i of row r; its loss reads the logits at
    ``i - 1``, so a document's first token is never trained on.

    ``document_ids`` are 0, 1, ... within a row and -1 on padding; ``position_ids`` restart at 0
    with each document. ``loss_mask`` is True on sampled tokens; ``logprobs`` are the behaviour
    policy's. Logprobs, advantages and versions are valid only where ``loss_mask`` is True.
    """

    token_ids: npt.NDArray[np.int64]  # [R, L]
    position_ids: npt.NDArray[np.int64]  # [R, L]
    document_ids: npt.NDArray[np.int64]  # [R, L]
    loss_mask: npt.NDArray[np.bool_]  # [R, L]
    logprobs: npt.NDArray[np.float32]  # [R, L]
    advantages: npt.NDArray[np.float32]  # [R, L]
    versions: npt.NDArray[np.int64]  # [R, L]
    temperature: float  # of sampling
    num_episodes: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not padding."""
        return int((self.document_ids >= 0).sum())

    @property
    def padding_share(self) -> float:
        return 1.0 - self.num_tokens / self.token_ids.size


def empty_rows(
    num_rows: int, row_len: int, *, temperature: float, num_episodes: int = 0
) -> TrainingBatch:
    """Rows of padding. To attention, padding is one more document: its positions start at 0."""
    shape = (num_rows, row_len)
    return TrainingBatch(
        token_ids=np.zeros(shape, dtype=np.int64),
        position_ids=np.tile(np.arange(row_len, dtype=np.int64), (num_rows, 1)),
        document_ids=np.full(shape, -1, dtype=np.int64),
        loss_mask=np.zeros(shape, dtype=np.bool_),
        logprobs=np.zeros(shape, dtype=np.float32),
        advantages=np.zeros(shape, dtype=np.float32),
        versions=np.full(shape, -1, dtype=np.int64),
        temperature=temperature,
        num_episodes=num_episodes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of an optimizer step; ``metrics`` are reduced over all trainer ranks."""

    version: int  # of the weights after the step
    metrics: dict[str, float] = field(default_factory=dict)
