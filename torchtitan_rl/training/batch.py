"""The episodes of one training step, which the controller sends to the trainer as numpy arrays, and
the trainer's answer.

Shapes: N is the number of tokens of all episodes, one episode after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchtitan_rl.images import PromptImage
from torchtitan_rl.training.config import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One training step. Entry i of an array describes token i.

    ``loss_mask`` is True for sampled tokens, where alone logprobs (under the policy that sampled
    them), advantages and versions are valid. An episode's first token has no distribution, so it is
    never trained on. ``groups`` has the number of each episode's group; the updates of a step never
    split a group.

    Token i was sampled from the set ``kept_sets[kept[i]]`` (packed by `token_sets.py`); -1, and
    ``kept`` None, mean the whole vocabulary.

    ``teacher_ids`` and ``teacher_logprobs`` are a teacher's K most likely tokens at the position of
    each token, and their logprobs; NaN where no teacher scored. ``teachers`` has the number of each
    episode's teacher in the trainer; -1 for none. The loss gets ``teacher_coefficient`` x the KL of
    either: `teacher_kl` (`training/losses/teacher.py`), or the KL of `selected_logprobs`.

    ``routed_experts`` are the K experts of each token in each of X layers, or `UNKNOWN_EXPERT`.

    ``images`` are the distinct images of all episodes. Their tokens, numbered through, are what
    ``features`` refers to; other tokens have -1. ``positions`` are those of `rope_positions`.
    """

    episode_lengths: npt.NDArray[np.int64]  # length of each episode, at least 1
    token_ids: npt.NDArray[np.int64]  # [N]
    loss_mask: npt.NDArray[np.bool_]  # [N]
    logprobs: npt.NDArray[np.float32]  # [N]
    advantages: npt.NDArray[np.float32]  # [N]
    versions: npt.NDArray[np.int64]  # [N]
    temperature: float  # sampling temperature
    groups: npt.NDArray[np.int64]  # group number of each episode
    kept: npt.NDArray[np.int32] | None = None  # [N]
    kept_sets: tuple[bytes, ...] = ()
    teacher_ids: npt.NDArray[np.int32] | None = None  # [N, K]
    teacher_logprobs: npt.NDArray[np.float32] | None = None  # [N, K]
    teachers: npt.NDArray[np.int64] | None = None  # [number of episodes]
    teacher_coefficient: float = 0.0
    routed_experts: npt.NDArray[np.uint8] | None = None  # [N, X, K]
    images: tuple[PromptImage, ...] = ()  # with ``start`` 0
    features: npt.NDArray[np.int64] | None = None  # [N]
    positions: npt.NDArray[np.int64] | None = None  # [N, 3]

    @property
    def num_episodes(self) -> int:
        return len(self.episode_lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all episodes; shared tokens count in each episode."""
        return len(self.token_ids)

    @property
    def episode_starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.episode_lengths) - self.episode_lengths

    @property
    def episode_ids(self) -> npt.NDArray[np.int64]:
        """The index of each token's episode, [N]."""
        return np.repeat(np.arange(self.num_episodes), self.episode_lengths)


Examples = TrainingBatch | None
"""The demonstrations of a step; None if it has none."""


def predicted_mask(batch: TrainingBatch) -> npt.NDArray[np.bool_]:
    """Return [N], True for tokens that follow another token of their episode."""
    mask = np.ones(batch.num_tokens, dtype=np.bool_)
    mask[batch.episode_starts] = False
    return mask


def imitated_mask(batch: TrainingBatch) -> npt.NDArray[np.bool_]:
    """Return [N], True for the tokens of demonstrations that have loss."""
    return batch.loss_mask & predicted_mask(batch)


def sums_by_episode(
    batch: TrainingBatch, values_N: npt.NDArray[np.float32], selected_N: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    values_N = np.where(selected_N, values_N, 0.0).astype(np.float64)
    return np.add.reduceat(values_N, batch.episode_starts)


def trained_mask(batch: TrainingBatch) -> npt.NDArray[np.bool_]:
    """Return [N], True for tokens that are trained on: sampled, with a finite logprob."""
    finite: npt.NDArray[np.bool_] = np.isfinite(batch.logprobs)
    return finite & batch.loss_mask & predicted_mask(batch)


def num_masked_nonfinite(batch: TrainingBatch) -> int:
    """Return the number of sampled tokens whose logprob is not finite, which have no loss."""
    return int((batch.loss_mask & predicted_mask(batch) & ~np.isfinite(batch.logprobs)).sum())


def cut_share(batch: TrainingBatch, selected_N: npt.NDArray[np.bool_]) -> float:
    """Return the share of the selected tokens that were sampled from a part of the vocabulary."""
    return 0.0 if batch.kept is None else float((batch.kept[selected_N] >= 0).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedLoss:
    """The loss of a step on demonstrations: the mean negative logprob in ``loss_mask``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """The loss of a step on pairs: DPO, see `training/preference.py`. The batch's episodes are
    pairs, the chosen one first. ``references``: the sum of each one's trained logprobs under the
    reference."""

    beta: float
    references: npt.NDArray[np.float64]  # [number of episodes]


StepLoss = LossConfig | SupervisedLoss | PreferenceLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """What a step computed for each of the batch's N tokens; NaN for those not trained on."""

    logprobs: npt.NDArray[np.float32]  # [N], under the weights before the token's update
    losses: npt.NDArray[np.float32]  # [N], parts of the loss; NaN if the loss does not tell them
    gradients: npt.NDArray[np.float32]  # [N], derivative of the loss by the token's logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of a training step; reduced over all trainer ranks."""

    version: int  # version of the weights after the step
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: TokenTerms | None = None
