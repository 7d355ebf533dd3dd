"""Computes logprobs of given tokens from logits, without a float32 copy of all logits; and the KL
of whole distributions to those of teachers, without all logits of the teachers.

Forward and backward pass process chunks of rows, in float32 for any type of logits. The vocabulary
may be split over the ranks of a group (tensor parallelism).

Shapes: S rows of logits, E targets, V vocabulary entries of this rank; C rows of a chunk and their
F targets; B bytes with one bit for each token of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

# Number of float32 elements per chunk. A chunk on the CPU has 16 MB: the C library keeps blocks of
# this size for the next operation, but returns blocks above 32 MB to the system each time.
_GPU_CHUNK_ELEMENTS = 1 << 24
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """Consecutive rows with one teacher. ``logits`` computes the teacher's logits [C, V] of a part
    of the rows, on this rank's part of the vocabulary. A teacher whose vocabulary is not split may
    have more tokens than the policy, after the policy's."""

    rows: slice
    logits: Callable[[slice], torch.Tensor]


def selected_logprobs(
    logits_SV: torch.Tensor,
    targets_E: torch.Tensor,
    rows_E: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    shard_size: int | None = None,
    kept_SB: torch.Tensor | None = None,
    taught: Sequence[TaughtRows] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the logprob of each target under softmax(logits / temperature) of its row, the row's
    entropy, and the KL of this distribution to that of the row's teacher.

    With ``kept_SB`` (uint8, lowest bit first) a row's softmax is over the tokens whose bit is 1;
    the other tokens' logits have no gradient. A target whose bit is 0 has the logprob -inf.

    ``rows_E`` is ascending; several targets may have the same row. The ranks of ``group`` split the
    vocabulary into shards of ``shard_size`` entries (the last may have fewer), into the whole of
    which ``targets_E`` are indices. Every rank gets the whole result and, if all have the same
    upstream gradient, the exact gradient of its logits. The entropy has no gradient.

    With p the row's distribution and q = softmax(logits) of its teacher, over all tokens, the KL is
    the reverse one of distillation (Gu et al. 2023, 2306.08543), sum_v p_v (log p_v - log q_v). It
    is 0 in rows that are not ``taught``, which are ordered.

    Returns:
        (logprobs [E], entropy [E], KL [S]), float32.
    """
    shard_size = logits_SV.shape[1] if shard_size is None else shard_size
    vocab_start = 0 if group is None else shard_size * dist.get_rank(group)
    chunks = _chunks(logits_SV, rows_E, shard_size, taught)
    logprobs_E, entropy_E, kl_S = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_SV, targets_E, rows_E, kept_SB, chunks, temperature, group, vocab_start
    )
    return logprobs_E, entropy_E, kl_S


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice
    targets: slice
    taught: TaughtRows | None  # that of all its rows


class _SelectedLogprobs(torch.autograd.Function):
    """Saves the logits and their log-normalizer [S]; backward recomputes the softmax. The
    derivative of the KL is computed in the forward pass, and kept where backward writes its result:
    the teacher's logits are computed once, and nothing else has the size of all logits."""

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        targets_E = targets_E - vocab_start
        is_taught = any(chunk.taught for chunk in chunks)
        slope_SV = torch.zeros_like(logits_SV) if is_taught else None
        kl_S = torch.zeros(len(logits_SV), device=logits_SV.device)
        parts = []
        for chunk in chunks:
            scaled_CV = _scaled(logits_SV, chunk, temperature, kept_SB, vocab_start)
            rows_F = rows_E[chunk.targets] - chunk.rows.start
            part = _forward_chunk(scaled_CV, targets_E[chunk.targets], rows_F, group)
            if chunk.taught is not None and slope_SV is not None:
                logprobs_CV = scaled_CV.sub_(part[2][:, None])
                kl_S[chunk.rows], slope_SV[chunk.rows] = _reverse_kl(
                    logprobs_CV, _teachers_logprobs(chunk, logprobs_CV, group), group
                )
            parts.append(part)
        logprobs_E, entropy_E, normalizer_S = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        ctx.save_for_backward(logits_SV, targets_E, rows_E, normalizer_S, kept_SB, slope_SV)
        ctx.temperature, ctx.chunks, ctx.vocab_start = temperature, chunks, vocab_start
        ctx.mark_non_differentiable(entropy_E)
        return logprobs_E, entropy_E, kl_S

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None, None, None]:
        logits_SV, targets_E, rows_E, normalizer_S, kept_SB, slope_SV = ctx.saved_tensors
        grad_SV = torch.empty_like(logits_SV) if slope_SV is None else slope_SV
        # d logprob / d logits = (onehot(target) - softmax) / temperature
        scale_E = grads[0] / ctx.temperature
        scale_S = torch.zeros_like(normalizer_S).index_add_(0, rows_E, scale_E)
        for chunk in ctx.chunks:
            scaled_CV = _scaled(logits_SV, chunk, ctx.temperature, kept_SB, ctx.vocab_start)
            grad_CV = (scaled_CV - normalizer_S[chunk.rows, None]).exp_()
            grad_CV.mul_(-scale_S[chunk.rows, None])
            rows_F = rows_E[chunk.targets] - chunk.rows.start
            index_F, held_F = _held(targets_E[chunk.targets], rows_F, grad_CV)
            grad_CV.view(-1).index_add_(0, index_F, scale_E[chunk.targets] * held_F)
            if chunk.taught is not None:
                scale_C = grads[2][chunk.rows] / ctx.temperature
                grad_CV.addcmul_(slope_SV[chunk.rows].float(), scale_C[:, None])
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
    """Return logprobs [F] and entropy [F] of the targets, and the normalizer [C] of the rows."""
    index_F, held_F = _held(targets_F, rows_F, scaled_CV)
    target_F = torch.where(held_F, scaled_CV.view(-1)[index_F], 0.0)  # 0 x -inf would be NaN
    normalizer_C = _normalizer(scaled_CV, group)
    # The sum of probability x logit. For excluded tokens, 0 x -inf would be NaN.
    probability_CV = (scaled_CV - normalizer_C[:, None]).exp_()
    mean_C = probability_CV.mul_(scaled_CV.clamp_min(-1e30)).sum(dim=1)
    if group is not None:
        sums = torch.cat([target_F, mean_C])
        dist.all_reduce(sums, group=group)
        target_F, mean_C = torch.split(sums, [len(target_F), len(normalizer_C)])
    entropy_C = normalizer_C - mean_C
    return target_F - normalizer_C[rows_F], entropy_C[rows_F], normalizer_C


def _normalizer(scaled_CV: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return [C]: logsumexp over the whole vocabulary."""
    if group is None:
        return scaled_CV.logsumexp(dim=1)
    top_C = scaled_CV.amax(dim=1)
    dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
    total_C = (scaled_CV - top_C[:, None]).exp_().sum(dim=1)
    dist.all_reduce(total_C, group=group)
    return top_C + total_C.log()


def _teachers_logprobs(
    chunk: _Chunk, like_CV: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return [C, V]: the teacher's logprobs of the policy's tokens."""
    assert chunk.taught is not None
    first = chunk.taught.rows.start
    taught_CV = chunk.taught.logits(slice(chunk.rows.start - first, chunk.rows.stop - first))
    taught_CV = taught_CV.float()
    normalizer_C = _normalizer(taught_CV, group)
    return taught_CV[:, : like_CV.shape[1]] - normalizer_C[:, None]


def _reverse_kl(
    logprobs_CV: torch.Tensor, taught_CV: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the KL [C] of the policy to the teacher, and its derivative [C, V] by the policy's
    scaled logits: p_v (log p_v - log q_v - KL)."""
    probability_CV = logprobs_CV.exp()
    # For excluded tokens, 0 x -inf would be NaN.
    slope_CV = logprobs_CV.clamp_min(-1e30).sub_(taught_CV).mul_(probability_CV)
    kl_C = slope_CV.sum(dim=1)
    if group is not None:
        dist.all_reduce(kl_C, group=group)
    return kl_C, slope_CV.sub_(probability_CV.mul_(kl_C[:, None]))


def _held(
    targets_F: torch.Tensor, rows_F: torch.Tensor, values_CV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's index in the flattened values, and whether this rank holds it, both
    [F]."""
    size = values_CV.shape[1]
    held_F = (targets_F >= 0) & (targets_F < size)
    return rows_F * size + targets_F.clamp(0, size - 1), held_F


def _chunks(
    logits_SV: torch.Tensor, rows_E: torch.Tensor, shard_size: int, taught: Sequence[TaughtRows]
) -> list[_Chunk]:
    """Split the rows into chunks with at most one teacher. All ranks have the same chunks, even a
    rank with fewer than ``shard_size`` entries, because whole chunks are summed over the ranks."""
    num_rows = len(logits_SV)
    elements = _CHUNK_ELEMENTS if logits_SV.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    size = max(1, elements // shard_size)
    edges = (edge for one in taught for edge in (one.rows.start, one.rows.stop))
    starts = sorted({*range(0, num_rows, size), num_rows, *edges})
    targets = torch.searchsorted(rows_E, rows_E.new_tensor(starts)).tolist()
    return [
        _Chunk(
            rows=slice(*rows),
            targets=slice(*entries),
            taught=next((one for one in taught if one.rows.start <= rows[0] < one.rows.stop), None),
        )
        for rows, entries in zip(pairwise(starts), pairwise(targets), strict=True)
    ]
