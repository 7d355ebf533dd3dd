"""Context parallelism: the ranks of a group each compute a part of the tokens of a forward pass.

Only attention needs other ranks' tokens. Around it, the ranks exchange heads for tokens and back
(Ulysses: Jacobs et al. 2023, 2309.14509): each rank computes the attention of all tokens, with a
part of the heads. So attention itself, with its trees and masks, does not change. torchtitan's own
context parallelism splits queries over the ranks; it supports neither trees nor the CPU.

The ranks then gather the logprobs, so that each computes the loss of all entries. The gradient of a
logprob goes back only to the rank that has computed it, and the sum over the ranks is the gradient
of the loss.

Shapes: R ranks of the group, L tokens of this rank, T = R x L tokens of the pass, N query heads, K
key heads, H elements of a head, X elements of all heads that a rank gets; E entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd


def exchange_heads(
    attention: Callable[..., torch.Tensor], group: dist.ProcessGroup
) -> Callable[..., torch.Tensor]:
    """Wrap an attention of [1, T] tokens as one of this rank's [1, L] tokens. R must divide the
    query heads and the key heads."""

    @functools.wraps(attention)
    def of_own_tokens(
        q_BLNH: torch.Tensor, k_BLKH: torch.Tensor, v_BLKH: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        ranks = dist.get_world_size(group)
        inputs = q_BLNH, k_BLKH, v_BLKH
        sent_LRX = [x.reshape(x.shape[1], ranks, -1) for x in inputs]
        own_TX = _exchange(torch.cat(sent_LRX, dim=2).transpose(0, 1), group).flatten(0, 1)
        sizes = [x.shape[2] for x in sent_LRX]
        q, k, v = (
            own.reshape(1, len(own), -1, x.shape[-1])
            for own, x in zip(torch.split(own_TX, sizes, dim=1), inputs, strict=True)
        )
        out_TNH = attention(q, k, v, **options)[0]
        heads_RLNH = _exchange(out_TNH.reshape(ranks, -1, *out_TNH.shape[1:]), group)
        return heads_RLNH.transpose(0, 1).flatten(1, 2)[None]

    return of_own_tokens


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return all_to_all_single_autograd(parts.contiguous(), None, None, group)


def gather_entries(
    own: torch.Tensor, first: int, num_entries: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the values [E, ...] of all ranks' entries; those in ``own`` begin at ``first``."""
    return _Gathered.apply(own, first, num_entries, group)  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, first: int, num_entries: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.own = slice(first, first + len(own))
        whole = own.new_zeros(num_entries, *own.shape[1:])
        whole[ctx.own] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grads[0][ctx.own], None, None, None
