"""Attention over prefix trees (`training/trees.py`): query q sees key k if
``k <= q < subtree_end[k]``.

On CUDA this is a mask for FlexAttention. On the CPU none of torchtitan's backends can be used
(varlen has no kernel there, flex no backward pass, sdpa no documents), so attention is composed of
calls of PyTorch's FlashAttention kernel, directly, because `scaled_dot_product_attention` does not
return the log-normalizer.

A node is a chain of tokens in which each token except the last has exactly one child. The kernel is
called once per node: the keys are the node's tokens, the queries those of the node's subtree, which
are contiguous and begin with the node's own tokens. Under the kernel's causal mask the node's
tokens see each other causally, and all later queries see the whole node. No other pair of tokens is
computed. A query gets one result from each node on its path; they are merged as FlashAttention
merges its blocks (Dao et al. 2022, 2205.14135). The backward kernel recomputes the probabilities
from the merged log-normalizer, so the gradients from all nodes are simply added.

Shapes: T tokens, M nodes, N query heads, K key heads, G = N / K query heads of a key head, H
elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.protocols.module import Module

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_mask_mod(
    subtree_end_T: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the rule of visibility as FlexAttention's ``mask_mod``."""

    def is_visible(
        _b: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (query < subtree_end_T[key])

    return is_visible


def tree_nodes(subtree_end_T: torch.Tensor) -> torch.Tensor:
    """Return the nodes as [M, 4]: each node's first token, the end of its tokens, the end of its
    subtree, and whether it is a root. Parents precede their children."""
    ends = subtree_end_T.numpy()
    # The tokens of a node have the same subtree end.
    starts = np.nonzero(np.diff(ends, prepend=-1))[0]
    stops = np.append(starts[1:], len(ends))
    subtree_ends = ends[starts]
    is_root = starts >= np.maximum.accumulate(np.append(0, subtree_ends[:-1]))
    return torch.from_numpy(np.stack([starts, stops, subtree_ends, is_root], axis=1))


class TreeAttention(Module):
    """Attention over `tree_nodes`, on the CPU. Tensor parallelism shards by torchtitan's parameter
    names."""

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
        attention_masks: torch.Tensor,
        scale: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        size, of_values = q_BLNH.shape[-1], v_BLNH.shape[-1]
        scale = size**-0.5 if scale is None else scale
        # The kernel needs one length. Zeros change nothing.
        v_TKH = v_BLNH[0] if of_values == size else F.pad(v_BLNH[0], (0, size - of_values))
        out_TNH, _normalizer = _attend(q_BLNH[0], k_BLNH[0], v_TKH, attention_masks, scale)
        return out_TNH[None, ..., :of_values]


@torch.library.custom_op("torchtitan_rl::tree_attention", mutates_args=())
def _attend(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    nodes_M4: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output [T, N, H] and the log-normalizers [K, G, T]. This is one operator, so that
    ``torch.compile`` and activation checkpointing do not trace its calls."""
    num_keys = k_TKH.shape[1]
    q, k, v = (_by_head(x, num_keys) for x in (q_TNH, k_TKH, v_TKH))
    k, v = k.expand_as(q), v.expand_as(q)
    out_TNH = torch.empty_like(q_TNH)
    out, normalizer = _by_head(out_TNH, num_keys), q.new_empty(q.shape[:3])
    for start, stop, end, is_root in nodes_M4.tolist():
        keys, queries = slice(start, stop), slice(start, end)
        node_out, node_normalizer = _flash(
            q[:, :, queries], k[:, :, keys], v[:, :, keys], 0.0, True, scale=scale
        )
        if is_root:
            out[:, :, queries] = node_out
            normalizer[:, :, queries] = node_normalizer
        else:
            merged = normalizer[:, :, queries]
            share = torch.sigmoid(node_normalizer - merged)
            out[:, :, queries].lerp_(node_out, share[..., None])
            torch.logaddexp(merged, node_normalizer, out=merged)
    return out_TNH, normalizer


@_attend.register_fake
def _attend_fake(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _size = q_TNH.shape
    num_keys = k_TKH.shape[1]
    normalizer = q_TNH.new_empty(num_keys, num_heads // num_keys, num_tokens)
    return q_TNH.new_empty(q_TNH.shape), normalizer


@torch.library.custom_op("torchtitan_rl::tree_attention_backward", mutates_args=())
def _attend_backward(
    grad_TNH: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    out_TNH: torch.Tensor,
    normalizer: torch.Tensor,
    nodes_M4: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_keys = k_TKH.shape[1]
    grad_q_TNH, grad_k_TKH, grad_v_TKH = (x.new_empty(x.shape) for x in (q_TNH, k_TKH, v_TKH))
    grad, q, k, v, out, grad_q, grad_k, grad_v = (
        _by_head(x, num_keys)
        for x in (grad_TNH, q_TNH, k_TKH, v_TKH, out_TNH, grad_q_TNH, grad_k_TKH, grad_v_TKH)
    )
    k, v = k.expand_as(q), v.expand_as(q)
    for start, stop, end, is_root in nodes_M4.tolist():
        keys, queries = slice(start, stop), slice(start, end)
        node_grad_q, node_grad_k, node_grad_v = _flash_backward(
            grad[:, :, queries],
            q[:, :, queries],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, queries],
            normalizer[:, :, queries],
            0.0,
            True,
            scale=scale,
        )
        if is_root:
            grad_q[:, :, queries] = node_grad_q
        else:
            grad_q[:, :, queries] += node_grad_q
        # A key belongs to one node.
        torch.sum(node_grad_k, 1, keepdim=True, out=grad_k[:, :, keys])
        torch.sum(node_grad_v, 1, keepdim=True, out=grad_v[:, :, keys])
    return grad_q_TNH, grad_k_TKH, grad_v_TKH


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
    q, k, v, nodes, out, normalizer = ctx.saved_tensors
    grads = _attend_backward(grad_TNH.contiguous(), q, k, v, out, normalizer, nodes, ctx.scale)
    return (*grads, None, None)


_attend.register_autograd(_differentiate, setup_context=_keep)


def _by_head(x_TNH: torch.Tensor, num_keys: int) -> torch.Tensor:
    """View as [K, G, T, H]: query heads are grouped by their shared key head. G is 1 for keys and
    values."""
    num_tokens, _, size = x_TNH.shape
    return x_TNH.view(num_tokens, num_keys, -1, size).permute(1, 2, 0, 3)
