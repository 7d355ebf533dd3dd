"""What a loss reads and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """T tokens of one part (microbatch) of a step; entry i of each tensor describes token i.

    All trained tokens of a sequence (episode) are in the same part. Only ``logprobs_T`` has a
    gradient. Values where ``trained_T`` is False are never read, NaN included.
    """

    logprobs_T: torch.Tensor  # under the policy being trained
    behaviour_T: torch.Tensor  # logprobs under the policy that sampled the tokens
    advantages_T: torch.Tensor
    trained_T: torch.Tensor  # bool
    ages_T: torch.Tensor  # int64; trainer version minus the version that sampled the token
    sequences_T: torch.Tensor  # int64; number of the token's sequence, in 0 .. T - 1
    reference_T: torch.Tensor | None = None  # logprobs under the reference model
    before_T: torch.Tensor | None = None  # under the weights before the step; None: as logprobs_T

    def cleaned(self) -> LossTokens:
        """The same tokens with logprobs and advantages of untrained tokens set to 0."""
        zero = torch.zeros((), dtype=self.logprobs_T.dtype, device=self.logprobs_T.device)

        def clean(values_T: torch.Tensor) -> torch.Tensor:
            return torch.where(self.trained_T, values_T, zero)

        return replace(
            self,
            logprobs_T=clean(self.logprobs_T),
            behaviour_T=clean(self.behaviour_T),
            advantages_T=clean(self.advantages_T),
            reference_T=None if self.reference_T is None else clean(self.reference_T),
            before_T=None if self.before_T is None else clean(self.before_T),
        )

    def sequence_sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T]: for each token the sum over its sequence; ``values_T`` is 0 on untrained tokens."""
        sums_T = values_T.new_zeros(len(values_T)).index_add(0, self.sequences_T, values_T)
        return sums_T[self.sequences_T]

    def sequence_lengths(self) -> torch.Tensor:
        """[T]: for each token the number of trained tokens of its sequence, at least 1."""
        return self.sequence_sum(self.trained_T.to(self.logprobs_T.dtype)).clamp_min(1.0)

    def sequence_mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T]: for each token the mean over the trained tokens of its sequence."""
        return self.sequence_sum(values_T) / self.sequence_lengths()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Sizes of all that an optimizer update is computed from, over all ranks and microbatches: the
    batch, or its minibatch. Tokens that the loss masks by their ratio are included, so the totals
    are known before the first forward pass."""

    num_tokens: int  # trained on
    num_sequences: int  # with at least one trained token


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """``loss`` is a scalar with a graph; the others are detached and of any shape. Over the parts
    of a step, ``sums`` are added and ``maxima`` maximized; `loss_metrics` reads the totals."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def cross_entropy_loss(
    logprobs_T: torch.Tensor, trained_T: torch.Tensor, *, num_trained: int
) -> LossOutput:
    """Supervised training: the mean negative logprob of the step's ``num_trained`` tokens."""
    zero = torch.zeros((), dtype=logprobs_T.dtype, device=logprobs_T.device)
    loss = -torch.where(trained_T, logprobs_T, zero).sum() / num_trained
    return LossOutput(loss=loss, sums={}, maxima={})
