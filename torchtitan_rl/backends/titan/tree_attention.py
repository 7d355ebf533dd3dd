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

import math
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
    """What `TreeAttention` computes; the same for every layer.

    A tile is: first query, end of queries, first key, end of keys, how many of its queries (the
    first ones) do not see all of its keys, and where its mask begins.
    """

    tiles_M6: torch.Tensor  # int64
    masks: torch.Tensor  # of all tiles, flattened: added to scores, 0 or -inf


def tree_tiles(subtree_end_T: torch.Tensor) -> TreeTiles:
    """Tiles that cover every visible pair once."""
    ends = subtree_end_T.numpy()
    # A node is a chain of only children: its tokens have the same subtree end.
    starts = np.nonzero(np.diff(ends, prepend=-1))[0].tolist()
    stops = [*starts[1:], len(ends)]
    tiles: list[tuple[int, ...]] = []
    masks, num_masked = [np.empty(0, dtype=np.bool_)], 0
    for first, stop in _joined(starts, stops, ends):
        num_blocks = -(-(stop - first) // _MAX_KEYS)
        size = -(-(stop - first) // num_blocks)
        for key in range(first, stop, size):
            key_end = min(key + size, stop)
            seen_until, query_end = int(ends[key:key_end].min()), int(ends[key:key_end].max())
            for query in range(key, query_end, _MAX_QUERIES):
                end = min(query + _MAX_QUERIES, query_end)
                blind_end = end if seen_until < end else min(key_end, end)
                queries = np.arange(query, max(blind_end, query))[:, None]
                keys = np.arange(key, key_end)
                mask = (keys > queries) | (queries >= ends[key:key_end])
                tiles.append((query, end, key, key_end, len(mask), num_masked))
                masks.append(mask.ravel())
                num_masked += mask.size
    is_hidden = torch.from_numpy(np.concatenate(masks))
    hidden = torch.zeros(num_masked).masked_fill_(is_hidden, -torch.inf)
    return TreeTiles(torch.tensor(tiles), hidden)


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
    tiles_M6: torch.Tensor,
    masks: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, N, H] and log-normalizers [K, T * G]. One operator, so that ``torch.compile`` and
    activation checkpointing need not look inside."""
    num_tokens, num_heads, size = q_TNH.shape
    group = num_heads // k_TKH.shape[1]
    q, k, v = _rows(q_TNH, group), (k_TKH * scale).transpose(0, 1), v_TKH.transpose(0, 1)
    sums = torch.zeros_like(q)
    top = q.new_full(q.shape[:2], -torch.inf)
    total = torch.zeros_like(top)
    scratch = _scratch(q, tiles_M6, group)
    for query, query_end, key, key_end, num_blind, mask in tiles_M6.tolist():
        rows = slice(query * group, query_end * group)
        scores_KQC = _product(q[:, rows], k[:, key:key_end], scratch)
        _hide(scores_KQC, masks[mask:], num_blind, group)
        old_KQ = top[:, rows]
        new_KQ = torch.maximum(old_KQ, scores_KQC.amax(dim=2))
        scores_KQC.sub_(new_KQ[..., None]).exp_()
        decay_KQ = (old_KQ - new_KQ).exp_()
        total[:, rows].mul_(decay_KQ).add_(scores_KQC.sum(dim=2))
        sums[:, rows].mul_(decay_KQ[..., None]).baddbmm_(scores_KQC, v[:, key:key_end])
        old_KQ.copy_(new_KQ)
    out_TNH = q_TNH.new_empty(q_TNH.shape)
    parts = (len(q), num_tokens, group)
    torch.div(
        sums.view(*parts, size),
        total.view(*parts, 1),
        out=out_TNH.view(num_tokens, -1, group, size).transpose(0, 1),
    )
    return out_TNH, top + total.log()


@_attend.register_fake
def _attend_fake(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _size = q_TNH.shape
    num_keys = k_TKH.shape[1]
    normalizer = q_TNH.new_empty(num_keys, num_tokens * (num_heads // num_keys))
    return q_TNH.new_empty(q_TNH.shape), normalizer


@torch.library.custom_op("torchtitan_rl::tree_attention_backward", mutates_args=())
def _attend_backward(
    grad_TNH: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    out_TNH: torch.Tensor,
    normalizer: torch.Tensor,
    tiles_M6: torch.Tensor,
    masks: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    group = q_TNH.shape[1] // k_TKH.shape[1]
    q, k, v = _rows(q_TNH, group), (k_TKH * scale).transpose(0, 1), v_TKH.transpose(0, 1)
    grad = _rows(grad_TNH, group)
    # Of each row, the sum over keys of probability x its gradient.
    inner = _rows((grad_TNH * out_TNH).sum(dim=2, keepdim=True), group)
    grad_q = torch.zeros_like(q)
    grad_k_TKH = k_TKH.new_zeros(k_TKH.shape)
    grad_v_TKH = v_TKH.new_zeros(v_TKH.shape)
    grad_k, grad_v = grad_k_TKH.transpose(0, 1), grad_v_TKH.transpose(0, 1)
    scratch, other_scratch = _scratch(q, tiles_M6, group), _scratch(q, tiles_M6, group)
    for query, query_end, key, key_end, num_blind, mask in tiles_M6.tolist():
        rows, keys = slice(query * group, query_end * group), slice(key, key_end)
        share_KQC = _product(q[:, rows], k[:, keys], scratch)
        _hide(share_KQC, masks[mask:], num_blind, group)
        share_KQC.sub_(normalizer[:, rows, None]).exp_()
        grad_v[:, keys] += torch.bmm(share_KQC.transpose(1, 2), grad[:, rows])
        grad_KQC = _product(grad[:, rows], v[:, keys], other_scratch)
        grad_KQC.sub_(inner[:, rows]).mul_(share_KQC)
        grad_q[:, rows].baddbmm_(grad_KQC, k[:, keys])
        grad_k[:, keys] += torch.bmm(grad_KQC.transpose(1, 2), q[:, rows])
    num_tokens, _, size = q_TNH.shape
    grad_q_TNH = grad_q.view(-1, num_tokens, group, size).transpose(0, 1).reshape(q_TNH.shape)
    return grad_q_TNH, grad_k_TKH.mul_(scale), grad_v_TKH


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
    q, k, v, tiles, masks, out, normalizer = ctx.saved_tensors
    grads = _attend_backward(grad_TNH, q, k, v, out, normalizer, tiles, masks, ctx.scale)
    return (*grads, None, None, None)


_attend.register_autograd(_differentiate, setup_context=_keep)


def _scratch(q: torch.Tensor, tiles_M6: torch.Tensor, group: int) -> torch.Tensor:
    """Memory for the scores of any of the tiles: reused, it stays in the cache."""
    queries_M, keys_M = tiles_M6[:, 1] - tiles_M6[:, 0], tiles_M6[:, 3] - tiles_M6[:, 2]
    return q.new_empty(len(q) * group * int((queries_M * keys_M).max()))


def _product(x_KQH: torch.Tensor, y_KCH: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """[K, Q, C] in ``scratch``."""
    shape = (x_KQH.shape[0], x_KQH.shape[1], y_KCH.shape[1])
    out_KQC = scratch[: math.prod(shape)].view(shape)
    return torch.bmm(x_KQH, y_KCH.transpose(1, 2), out=out_KQC)


def _hide(scores_KQC: torch.Tensor, masks: torch.Tensor, num_blind: int, group: int) -> None:
    """Add the first of ``masks`` to the scores of the first ``num_blind`` queries."""
    if num_blind:
        num_keys = scores_KQC.shape[2]
        mask_QC = masks[: num_blind * num_keys].view(num_blind, 1, num_keys)
        scores_KQC[:, : num_blind * group].view(-1, num_blind, group, num_keys).add_(mask_QC)


def _rows(x_TNH: torch.Tensor, group: int) -> torch.Tensor:
    """[K, T * G, H]: for each key head, the rows of its query heads, token by token."""
    num_tokens, num_heads, size = x_TNH.shape
    num_keys = num_heads // group
    grouped = x_TNH.reshape(num_tokens, num_keys, group, size).transpose(0, 1)
    return grouped.reshape(num_keys, num_tokens * group, size)
