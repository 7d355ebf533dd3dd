"""The episodes of one training step: what the controller sends to the trainer, in numpy, and its
answer. How they are computed (`training/trees.py`, `training/packing.py`) is the trainer's part.

Shapes: N tokens of all episodes, one episode after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One training step. Entry i of an array describes token i.

    ``loss_mask`` is True on sampled tokens; ``logprobs`` are the behaviour policy's. Logprobs,
    advantages and versions are valid only where ``loss_mask`` is True. An episode's first token has
    no distribution, so it is never trained on.

    Token i was sampled from the set ``kept_sets[kept[i]]`` (packed by `token_sets.py`);
    -1 stands for the whole vocabulary, as None does for all tokens. ``groups`` are the numbers of
    the episodes' groups, which several updates of a step do not cut.
    """

    episode_lengths: npt.NDArray[np.int64]  # of each episode, at least 1
    token_ids: npt.NDArray[np.int64]  # [N]
    loss_mask: npt.NDArray[np.bool_]  # [N]
    logprobs: npt.NDArray[np.float32]  # [N]
    advantages: npt.NDArray[np.float32]  # [N]
    versions: npt.NDArray[np.int64]  # [N]
    temperature: float  # of sampling
    groups: npt.NDArray[np.int64]  # of each episode
    kept: npt.NDArray[np.int32] | None = None  # [N]
    kept_sets: tuple[bytes, ...] = ()

    @property
    def num_episodes(self) -> int:
        return len(self.episode_lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all episodes, those that episodes share counted in each."""
        return len(self.token_ids)

    @property
    def episode_starts(self) -> npt.NDArray[np.int64]:
        """Index of each episode's first token."""
        return np.cumsum(self.episode_lengths) - self.episode_lengths

    @property
    def episode_ids(self) -> npt.NDArray[np.int64]:
        """[N]: the number of each token's episode: 0, 1, ..."""
        return np.repeat(np.arange(self.num_episodes), self.episode_lengths)


def predicted_mask(batch: TrainingBatch) -> npt.NDArray[np.bool_]:
    """[N], True on tokens that follow another token of their episode."""
    mask = np.ones(batch.num_tokens, dtype=np.bool_)
    mask[batch.episode_starts] = False
    return mask


def trained_mask(batch: TrainingBatch) -> npt.NDArray[np.bool_]:
    """[N], True on tokens that the policy loss reads: sampled, with a finite logprob."""
    finite: npt.NDArray[np.bool_] = np.isfinite(batch.logprobs)
    return finite & batch.loss_mask & predicted_mask(batch)


def num_masked_nonfinite(batch: TrainingBatch) -> int:
    """Number of sampled tokens without loss because their behaviour logprob is not finite."""
    return int((batch.loss_mask & predicted_mask(batch) & ~np.isfinite(batch.logprobs)).sum())


def cut_share(batch: TrainingBatch, selected_N: npt.NDArray[np.bool_]) -> float:
    """Share of the selected tokens that were sampled from a part of the vocabulary."""
    return 0.0 if batch.kept is None else float((batch.kept[selected_N] >= 0).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of a training step; ``metrics`` are reduced over all trainer ranks."""

    version: int  # of the weights after the step
    metrics: dict[str, float] = field(default_factory=dict)
