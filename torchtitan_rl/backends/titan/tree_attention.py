"""Attention over prefix trees (`training/trees.py`): query q sees key k if
``k <= q < subtree_end[k]``.

On CUDA this is a mask for FlexAttention. On the CPU torchtitan's backends have no kernel (varlen),
no backward pass (flex) or no documents (sdpa), so it is computed here, in tiles: some keys of one
node, and the queries after them in the node's subtree, which are contiguous. Nothing else is
computed, whatever the length of the row. A query's tiles are merged as FlashAttention merges its
blocks (Dao et al. 2022, 2205.14135), and the backward pass recomputes the probabilities from their
log-normalizer.

Shapes: T tokens, N query heads, K key heads, G = N / K query heads of a key head, H elements of a
head. A tile has Q rows (its queries times G) and C keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.protocols.module import Module

_MAX_KEYS = 128
_MAX_QUERIES = 512  # the scores of a tile stay in a core's cache
_CALL_COST = 1500  # of a further tile, in scores


def tree_mask_mod(
    subtree_end_T: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The rule as FlexAttention's ``mask_mod``."""

    def is_visible(
        _b: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (query < subtree_end_T[key])

    return is_visible


class TreeTiles(NamedTuple):
    """What `TreeAttention` computes; the same for every layer."""

    tiles_M4: torch.Tensor  # int64: first query, end of queries, first key, end of keys
    subtree_end_T: torch.Tensor


def tree_tiles(subtree_end_T: torch.Tensor) -> TreeTiles:
    """Tiles that cover every visible pair once."""
    ends = subtree_end_T.numpy()
    # A node is a chain of only children: its tokens have the same subtree end.
    starts = np.nonzero(np.diff(ends, prepend=-1))[0].tolist()
    stops = [*starts[1:], len(ends)]
    tiles: list[tuple[int, int, int, int]] = []
    for first, stop in _joined(starts, stops, ends):
        num_blocks = -(-(stop - first) // _MAX_KEYS)
        size = -(-(stop - first) // num_blocks)
        for key in range(first, stop, size):
            key_end = min(key + size, stop)
            query_end = int(ends[key:key_end].max())
            tiles += [
                (query, min(query + _MAX_QUERIES, query_end), key, key_end)
                for query in range(key, query_end, _MAX_QUERIES)
            ]
    return TreeTiles(torch.tensor(tiles), subtree_end_T)


def _joined(
    starts: list[int], stops: list[int], ends: np.ndarray[Any, np.dtype[np.int64]]
) -> list[tuple[int, int]]:
    """Runs of keys that are computed together: nodes, small neighbours joined where the scores that
    are computed in vain cost less than another call."""
    runs: list[tuple[int, int]] = []
    cost = run_end = 0  # of the last run: its scores, the end of its queries
    for start, stop in zip(starts, stops, strict=True):
        end = int(ends[start])
        alone = (stop - start) * (end - start)
        if runs:
            first = runs[-1][0]
            together = (stop - first) * (max(run_end, end) - first)
            if stop - first <= _MAX_KEYS and together <= cost + alone + _CALL_COST:
                runs[-1] = (first, stop)
                cost, run_end = together, max(run_end, end)
                continue
        runs.append((start, stop))
        cost, run_end = alone, end
    return runs


class TreeAttention(Module):
    """Attention in the tiles of `tree_tiles`, on the CPU. Parameter names are torchtitan's, which
    shards by name under tensor parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: TreeTiles,
        scale: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        out_TNH, _normalizer = _attend(q_BLNH[0], k_BLNH[0], v_BLNH[0], *attention_masks, scale)
        return out_TNH[None]


@torch.library.custom_op("torchtitan_rl::tree_attention", mutates_args=())
def _attend(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    tiles_M4: torch.Tensor,
    subtree_end_T: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, N, H] and log-normalizers [K, T * G]. One operator, so that ``torch.compile`` and
    activation checkpointing need not look inside."""
    num_keys, group = k_TKH.shape[1], q_TNH.shape[1] // k_TKH.shape[1]
    q, k, v = (
        _by_head(q_TNH * scale, num_keys),
        _by_head(k_TKH, num_keys),
        _by_head(v_TKH, num_keys),
    )
    out = torch.zeros_like(q)
    top = q.new_full(q.shape[:2], -torch.inf)
    total = torch.zeros_like(top)
    for query, query_end, key, key_end in tiles_M4.tolist():
        rows = slice(query * group, query_end * group)
        scores_KQC = _scores(q[:, rows], k[:, key:key_end], query, key, subtree_end_T, group)
        old_KQ = top[:, rows]
        new_KQ = torch.maximum(old_KQ, scores_KQC.amax(dim=2))
        scores_KQC.sub_(new_KQ[..., None]).exp_()
        decay_KQ = (old_KQ - new_KQ).exp_()
        total[:, rows].mul_(decay_KQ).add_(scores_KQC.sum(dim=2))
        out[:, rows].mul_(decay_KQ[..., None]).baddbmm_(scores_KQC, v[:, key:key_end])
        old_KQ.copy_(new_KQ)
    out /= total[..., None]
    return _by_token(out, q_TNH.shape), top + total.log()


@_attend.register_fake
def _attend_fake(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _size = q_TNH.shape
    num_keys = k_TKH.shape[1]
    normalizer = q_TNH.new_empty(num_keys, num_tokens * (num_heads // num_keys))
    return torch.empty_like(q_TNH, memory_format=torch.contiguous_format), normalizer


@torch.library.custom_op("torchtitan_rl::tree_attention_backward", mutates_args=())
def _attend_backward(
    grad_TNH: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    out_TNH: torch.Tensor,
    normalizer: torch.Tensor,
    tiles_M4: torch.Tensor,
    subtree_end_T: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    num_keys, group = k_TKH.shape[1], q_TNH.shape[1] // k_TKH.shape[1]
    q, k, v = (
        _by_head(q_TNH * scale, num_keys),
        _by_head(k_TKH, num_keys),
        _by_head(v_TKH, num_keys),
    )
    grad, out = _by_head(grad_TNH, num_keys), _by_head(out_TNH, num_keys)
    inner = (grad * out).sum(dim=2)  # of each row: sum over keys of probability x its gradient
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for query, query_end, key, key_end in tiles_M4.tolist():
        rows, keys = slice(query * group, query_end * group), slice(key, key_end)
        share_KQC = _scores(q[:, rows], k[:, keys], query, key, subtree_end_T, group)
        share_KQC.sub_(normalizer[:, rows, None]).exp_()
        grad_v[:, keys].baddbmm_(share_KQC.transpose(1, 2), grad[:, rows])
        grad_KQC = torch.bmm(grad[:, rows], v[:, keys].transpose(1, 2))
        grad_KQC.sub_(inner[:, rows, None]).mul_(share_KQC)
        grad_q[:, rows].baddbmm_(grad_KQC, k[:, keys])
        grad_k[:, keys].baddbmm_(grad_KQC.transpose(1, 2), q[:, rows])
    grad_q *= scale
    return (
        _by_token(grad_q, q_TNH.shape),
        _by_token(grad_k, k_TKH.shape),
        _by_token(grad_v, v_TKH.shape),
    )


@_attend_backward.register_fake
def _attend_backward_fake(
    grad_TNH: torch.Tensor, q_TNH: torch.Tensor, k_TKH: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    empty = [q_TNH.new_empty(x.shape) for x in (q_TNH, k_TKH, k_TKH)]
    return empty[0], empty[1], empty[2]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_TNH: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    q, k, v, tiles, subtree_end, out, normalizer = ctx.saved_tensors
    grads = _attend_backward(grad_TNH, q, k, v, out, normalizer, tiles, subtree_end, ctx.scale)
    return (*grads, None, None, None)


_attend.register_autograd(_differentiate, setup_context=_keep)


def _scores(
    q_KQH: torch.Tensor,
    k_KCH: torch.Tensor,
    query: int,
    key: int,
    subtree_end_T: torch.Tensor,
    group: int,
) -> torch.Tensor:
    """[K, Q, C], -inf where the query does not see the key; ``query`` and ``key`` are the first."""
    scores_KQC = torch.bmm(q_KQH, k_KCH.transpose(1, 2))
    num_queries, num_keys = scores_KQC.shape[1] // group, scores_KQC.shape[2]
    ends_C = subtree_end_T[key : key + num_keys]
    if query >= key + num_keys and int(ends_C.min()) >= query + num_queries:
        return scores_KQC
    queries_Q1 = torch.arange(query, query + num_queries)[:, None]
    keys_C = torch.arange(key, key + num_keys)
    hidden_QC = (keys_C > queries_Q1) | (queries_Q1 >= ends_C)
    grouped = scores_KQC.view(-1, num_queries, group, num_keys)
    grouped.masked_fill_(hidden_QC[:, None], -torch.inf)
    return scores_KQC


def _by_head(x_TNH: torch.Tensor, num_keys: int) -> torch.Tensor:
    """[K, T * G, H]: for each key head, the rows of its query heads, token by token."""
    num_tokens, _, size = x_TNH.shape
    grouped = x_TNH.reshape(num_tokens, num_keys, -1, size).transpose(0, 1)
    return grouped.reshape(num_keys, -1, size).contiguous()


def _by_token(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `_by_head`."""
    num_tokens, _, size = shape
    return x.view(len(x), num_tokens, -1, size).transpose(0, 1).reshape(shape)
