"""Computes logprobs of given tokens from logits, without a float32 copy of all logits.

Forward and backward pass process chunks of rows, in float32 for any type of logits. The vocabulary
may be split over the ranks of a group (tensor parallelism).

Shapes: S rows of logits, E targets, V vocabulary entries of this rank; C rows of a chunk and their
F targets; B bytes with one bit for each token of the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

# Number of float32 elements per chunk. A chunk on the CPU has 16 MB: the C library keeps blocks of
# this size for the next operation, but returns blocks above 32 MB to the system each time.
_GPU_CHUNK_ELEMENTS = 1 << 24
_CHUNK_ELEMENTS = 1 << 22


def selected_logprobs(
    logits_SV: torch.Tensor,
    targets_E: torch.Tensor,
    rows_E: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    shard_size: int | None = None,
    kept_SB: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logprob of each target under softmax(logits / temperature) of its row, and the
    row's entropy.

    With ``kept_SB`` (uint8, lowest bit first) a row's softmax is over the tokens whose bit is 1;
    the other tokens' logits have no gradient. A target whose bit is 0 has the logprob -inf.

    ``rows_E`` is ascending; several targets may have the same row. The ranks of ``group`` split the
    vocabulary into shards of ``shard_size`` entries; the last shard may have fewer. ``targets_E``
    are indices into the whole vocabulary. Every rank gets the whole result. If all ranks have the
    same upstream gradient, each gets the exact gradient of its logits. The entropy has no gradient.

    Returns:
        (logprobs [E], entropy [E]), float32.
    """
    shard_size = logits_SV.shape[1] if shard_size is None else shard_size
    vocab_start = 0 if group is None else shard_size * dist.get_rank(group)
    chunks = _chunks(logits_SV, rows_E, shard_size)
    logprobs_E, entropy_E = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_SV, targets_E, rows_E, kept_SB, chunks, temperature, group, vocab_start
    )
    return logprobs_E, entropy_E


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice
    targets: slice


class _SelectedLogprobs(torch.autograd.Function):
    """Saves the logits and their log-normalizer [S]; backward recomputes the softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_SV: torch.Tensor,
        targets_E: torch.Tensor,
        rows_E: torch.Tensor,
        kept_SB: torch.Tensor | None,
        chunks: list[_Chunk],
        temperature: float,
        group: dist.ProcessGroup | None,
        vocab_start: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets_E = targets_E - vocab_start
        parts = [
            _forward_chunk(
                _scaled(logits_SV, chunk, temperature, kept_SB, vocab_start),
                targets_E[chunk.targets],
                rows_E[chunk.targets] - chunk.rows.start,
                group,
            )
            for chunk in chunks
        ]
        logprobs_E, entropy_E, normalizer_S = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        ctx.save_for_backward(logits_SV, targets_E, rows_E, normalizer_S, kept_SB)
        ctx.temperature, ctx.chunks, ctx.vocab_start = temperature, chunks, vocab_start
        ctx.mark_non_differentiable(entropy_E)
        return logprobs_E, entropy_E

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None, None, None]:
        logits_SV, targets_E, rows_E, normalizer_S, kept_SB = ctx.saved_tensors
        grad_SV = torch.empty_like(logits_SV)
        # d logprob / d logits = (onehot(target) - softmax) / temperature
        scale_E = grads[0] / ctx.temperature
        scale_S = torch.zeros_like(normalizer_S).index_add_(0, rows_E, scale_E)
        for chunk in ctx.chunks:
            scaled_CV = _scaled(logits_SV, chunk, ctx.temperature, kept_SB, ctx.vocab_start)
            grad_CV = (scaled_CV - normalizer_S[chunk.rows, None]).exp_()
            grad_CV.mul_(-scale_S[chunk.rows, None])
            index_F, held_F = _held(
                targets_E[chunk.targets], rows_E[chunk.targets] - chunk.rows.start, grad_CV
            )
            grad_CV.view(-1).index_add_(0, index_F, scale_E[chunk.targets] * held_F)
            grad_SV[chunk.rows] = grad_CV
        return grad_SV, None, None, None, None, None, None, None


def _scaled(
    logits_SV: torch.Tensor,
    chunk: _Chunk,
    temperature: float,
    kept_SB: torch.Tensor | None,
    vocab_start: int,
) -> torch.Tensor:
    """Return [C, V]: the chunk's logits divided by the temperature; -inf for excluded tokens."""
    scaled_CV = logits_SV[chunk.rows].float() / temperature
    if kept_SB is None:
        return scaled_CV
    bits_8 = torch.arange(8, dtype=torch.uint8, device=kept_SB.device)
    kept_CV = (kept_SB[chunk.rows, :, None] >> bits_8).bitwise_and_(1).flatten(1)
    end = vocab_start + scaled_CV.shape[1]
    return scaled_CV.masked_fill_(kept_CV[:, vocab_start:end] == 0, -torch.inf)


def _forward_chunk(
    scaled_CV: torch.Tensor,
    targets_F: torch.Tensor,
    rows_F: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logprobs [F] and entropy [F] of the chunk's targets, and the normalizer [C] of its
    rows."""
    index_F, held_F = _held(targets_F, rows_F, scaled_CV)
    target_F = torch.where(held_F, scaled_CV.view(-1)[index_F], 0.0)  # 0 x -inf would be NaN
    if group is None:
        normalizer_C = scaled_CV.logsumexp(dim=1)
        mean_C = _expected(scaled_CV, normalizer_C)
    else:
        top_C = scaled_CV.amax(dim=1)
        dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
        total_C = (scaled_CV - top_C[:, None]).exp_().sum(dim=1)
        dist.all_reduce(total_C, group=group)
        normalizer_C = top_C + total_C.log()
        sums = torch.cat([target_F, _expected(scaled_CV, normalizer_C)])
        dist.all_reduce(sums, group=group)
        target_F, mean_C = torch.split(sums, [len(target_F), len(normalizer_C)])
    entropy_C = normalizer_C - mean_C
    return target_F - normalizer_C[rows_F], entropy_C[rows_F], normalizer_C


def _expected(scaled_CV: torch.Tensor, normalizer_C: torch.Tensor) -> torch.Tensor:
    """Return [C]: the sum over the vocabulary of probability x logit. The entropy is the normalizer
    minus this."""
    probability_CV = (scaled_CV - normalizer_C[:, None]).exp_()
    # For excluded tokens, 0 x -inf would be NaN.
    return probability_CV.mul_(scaled_CV.clamp_min(-1e30)).sum(dim=1)


def _held(
    targets_F: torch.Tensor, rows_F: torch.Tensor, values_CV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index [F] of each target in the flattened values, and [F] whether this rank holds
    the target."""
    size = values_CV.shape[1]
    held_F = (targets_F >= 0) & (targets_F < size)
    return rows_F * size + targets_F.clamp(0, size - 1), held_F


def _chunks(logits_SV: torch.Tensor, rows_E: torch.Tensor, shard_size: int) -> list[_Chunk]:
    """Split the rows into chunks. All ranks have the same chunks, even a rank with fewer than
    ``shard_size`` entries, because whole chunks are summed over the ranks."""
    num_rows = len(logits_SV)
    elements = _CHUNK_ELEMENTS if logits_SV.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    size = max(1, elements // shard_size)
    starts = [*range(0, num_rows, size), num_rows]
    targets = torch.searchsorted(rows_E, rows_E.new_tensor(starts)).tolist()
    return [
        _Chunk(rows=slice(*rows), targets=slice(*entries))
        for rows, entries in zip(pairwise(starts), pairwise(targets), strict=True)
    ]
