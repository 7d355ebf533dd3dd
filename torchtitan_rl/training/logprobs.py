"""Logprobs of given tokens under logits, without a float32 copy of all logits.

Forward and backward pass work on chunks of tokens, in float32 whatever the type of the logits, and
on a vocabulary that may be split over the ranks of a group (tensor parallelism).

Shapes: T tokens, C tokens of a chunk, V vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_CHUNK_ELEMENTS = 1 << 24  # 64 MB of float32 at a time


def selected_logprobs(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each target under softmax(logits / temperature), and that softmax's entropy.

    The ranks of ``group`` split the vocabulary: this one holds V entries from ``vocab_start`` on;
    ``targets_T`` are indices into the whole. Every rank gets the whole result, and, given the same
    upstream gradient on all, the exact gradient of its logits. The entropy has no gradient.

    Returns:
        (logprobs [T], entropy [T]), float32.
    """
    logprobs_T, entropy_T = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, temperature, group, vocab_start
    )
    return logprobs_T, entropy_T


class _SelectedLogprobs(torch.autograd.Function):
    """Saves the logits and their log-normalizer [T]; backward recomputes the softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: torch.Tensor,
        targets_T: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        vocab_start: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            _forward_chunk(logits_CV, targets_C - vocab_start, temperature, group)
            for logits_CV, targets_C in _chunks(logits_TV, targets_T)
        ]
        logprobs_T, entropy_T, normalizer_T = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        ctx.save_for_backward(logits_TV, targets_T - vocab_start, normalizer_T)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits_TV, local_targets_T, normalizer_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        start = 0
        for logits_CV, targets_C in _chunks(logits_TV, local_targets_T):
            chunk = slice(start, start + len(targets_C))
            start = chunk.stop
            # d logprob / d logits = (onehot(target) - softmax) / temperature
            scale_C = grads[0][chunk] / ctx.temperature
            scaled_CV = logits_CV.float() / ctx.temperature
            grad_CV = (scaled_CV - normalizer_T[chunk, None]).exp_().mul_(-scale_C[:, None])
            index_C1, held_C = _held(targets_C, logits_CV.shape[1])
            grad_CV.scatter_add_(1, index_C1, (scale_C * held_C)[:, None])
            grad_TV[chunk] = grad_CV
        return grad_TV, None, None, None, None


def _forward_chunk(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scaled_CV = logits_CV.float() / temperature
    index_C1, held_C = _held(targets_C, scaled_CV.shape[1])
    target_C = scaled_CV.gather(1, index_C1)[:, 0] * held_C
    if group is None:
        normalizer_C = scaled_CV.logsumexp(dim=1)
        mean_C = _expected(scaled_CV, normalizer_C)
        return target_C - normalizer_C, normalizer_C - mean_C, normalizer_C
    top_C = scaled_CV.amax(dim=1)
    dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
    total_C = (scaled_CV - top_C[:, None]).exp_().sum(dim=1)
    dist.all_reduce(total_C, group=group)
    normalizer_C = top_C + total_C.log()
    sums_2C = torch.stack([target_C, _expected(scaled_CV, normalizer_C)])
    dist.all_reduce(sums_2C, group=group)
    return sums_2C[0] - normalizer_C, normalizer_C - sums_2C[1], normalizer_C


def _expected(scaled_CV: torch.Tensor, normalizer_C: torch.Tensor) -> torch.Tensor:
    """[C]: sum over the vocabulary of probability x logit; the entropy is normalizer minus this."""
    probability_CV = (scaled_CV - normalizer_C[:, None]).exp_()
    # 0 x -inf would be NaN where a token is masked out of the vocabulary.
    return probability_CV.mul_(scaled_CV.clamp_min(-1e30)).sum(dim=1)


def _held(targets_C: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [C, 1] into this rank's entries, and [C] whether it holds the target."""
    held_C = (targets_C >= 0) & (targets_C < size)
    return targets_C.clamp(0, size - 1)[:, None], held_C


def _chunks(
    logits_TV: torch.Tensor, targets_T: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    size = max(1, _CHUNK_ELEMENTS // max(1, logits_TV.shape[1]))
    return list(zip(torch.split(logits_TV, size), torch.split(targets_T, size), strict=True))
