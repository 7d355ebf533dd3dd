"""What a loss reads and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """T tokens of one part of a step; entry i of each tensor describes token i.

    ``sequences_T`` numbers the sequences (episodes) of this part with 0 to T - 1 in any order; all
    trained tokens of a sequence are in the part. ``ages_T`` is the trainer's version minus the one
    that the token was sampled under. Only ``logprobs_T`` has a gradient.
    """

    logprobs_T: torch.Tensor  # of the policy that is trained
    behaviour_T: torch.Tensor  # that the token was sampled with
    advantages_T: torch.Tensor
    trained_T: torch.Tensor  # bool; the rest is to be read only where it holds
    ages_T: torch.Tensor  # int64
    sequences_T: torch.Tensor  # int64
    reference_T: torch.Tensor | None = None  # logprobs of the reference model

    def cleaned(self) -> LossTokens:
        """The same with 0 for logprobs and advantages wherever a token is not trained on."""
        zero = torch.zeros((), dtype=self.logprobs_T.dtype, device=self.logprobs_T.device)
        reference_T = self.reference_T
        return replace(
            self,
            logprobs_T=torch.where(self.trained_T, self.logprobs_T, zero),
            behaviour_T=torch.where(self.trained_T, self.behaviour_T, zero),
            advantages_T=torch.where(self.trained_T, self.advantages_T, zero),
            reference_T=reference_T
            if reference_T is None
            else torch.where(self.trained_T, reference_T, zero),
        )

    def sequence_sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T]: for each token the sum over its sequence; ``values_T`` is 0 where not trained."""
        sums_T = values_T.new_zeros(len(values_T)).index_add(0, self.sequences_T, values_T)
        return sums_T[self.sequences_T]

    def sequence_lengths(self) -> torch.Tensor:
        """[T]: for each token the number of trained tokens of its sequence, at least 1."""
        return self.sequence_sum(self.trained_T.to(self.logprobs_T.dtype)).clamp_min(1.0)

    def sequence_mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T]: for each token the mean over its sequence's trained tokens."""
        return self.sequence_sum(values_T) / self.sequence_lengths()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Of a whole optimizer step, over all ranks and microbatches. Tokens that a loss masks by
    their ratio count, so that the totals are known before the first forward pass."""

    num_tokens: int  # trained on
    num_sequences: int  # with at least one such token


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """``loss`` is a scalar with a graph. ``sums`` add up over parts of a step, of ``maxima`` the
    largest counts; both are detached, of any shape, and `loss_metrics` reads their totals."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]
