"""Packed rows of episodes: what the controller hands to the trainer, in numpy, and what it answers.

Shapes: R rows, L tokens a row. Row tokens belong to documents (episodes) laid one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One optimizer step. Entry ``[r, i]`` describes token i of row r; the loss on it reads the
    logits at ``i - 1``, so a document's first token is never trained on.

    ``document_ids`` are 0, 1, ... within a row and -1 on padding; ``position_ids`` restart at 0
    with each document. ``loss_mask`` is True on sampled tokens; ``logprobs`` are the behaviour
    policy's; all are to be read only where ``loss_mask`` holds.
    """

    token_ids: npt.NDArray[np.int64]  # [R, L]
    position_ids: npt.NDArray[np.int64]  # [R, L]
    document_ids: npt.NDArray[np.int64]  # [R, L]
    loss_mask: npt.NDArray[np.bool_]  # [R, L]
    logprobs: npt.NDArray[np.float32]  # [R, L]
    advantages: npt.NDArray[np.float32]  # [R, L]
    versions: npt.NDArray[np.int64]  # [R, L]
    temperature: float  # that the tokens were sampled at
    num_episodes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_ids >= 0).sum())

    @property
    def padding_share(self) -> float:
        return 1.0 - self.num_tokens / self.token_ids.size


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What an optimizer step returned; ``metrics`` are reduced over all trainer ranks."""

    version: int  # of the weights after the step
    metrics: dict[str, float] = field(default_factory=dict)
