"""torchtitan's SwiGLU layer on the CPU, in blocks of tokens whose hidden values stay in the cache.

Between the matrix products of this layer, the hidden values of all tokens pass through memory in
each elementwise operation, forward and backward. Block by block they do so in the cache; only the
two factors of the hidden values are kept for the backward pass (autograd keeps five tensors).

Shapes: T tokens, D model dimension, F hidden dimension; C tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchtitan_rl.backends.titan.layers import blocks, is_plain

# isort: split
from torchtitan.models.common import FeedForward


class CpuFeedForward(FeedForward):
    """w2(silu(w1(x)) x w3(x))."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.w1.weight, self.w2.weight, self.w3.weight)
        if not is_plain(x, *weights):
            composed: torch.Tensor = super().forward(x)
            return composed
        out: torch.Tensor = _SwiGLU.apply(x, *weights)  # type: ignore[no-untyped-call]
        return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w1_FD: torch.Tensor, w2_DF: torch.Tensor, w3_FD: torch.Tensor
    ) -> torch.Tensor:
        x_TD = x.flatten(0, -2)
        out_TD = torch.empty_like(x_TD)
        gate_TF = x.new_empty(len(x_TD), len(w1_FD))
        up_TF = torch.empty_like(gate_TF)
        for rows in blocks(gate_TF):
            gate_CF = torch.mm(x_TD[rows], w1_FD.T, out=gate_TF[rows])
            up_CF = torch.mm(x_TD[rows], w3_FD.T, out=up_TF[rows])
            torch.mm(F.silu(gate_CF).mul_(up_CF), w2_DF.T, out=out_TD[rows])
        ctx.save_for_backward(x_TD, w1_FD, w2_DF, w3_FD, gate_TF, up_TF)
        return out_TD.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_TD, w1_FD, w2_DF, w3_FD, gate_TF, up_TF = ctx.saved_tensors
        grad_TD = grads[0].reshape(x_TD.shape)
        grad_x_TD = torch.empty_like(x_TD)
        grad_w1_FD, grad_w2_DF, grad_w3_FD = map(torch.zeros_like, (w1_FD, w2_DF, w3_FD))
        for rows in blocks(gate_TF):
            x_CD, grad_CD, gate_CF, up_CF = x_TD[rows], grad_TD[rows], gate_TF[rows], up_TF[rows]
            silu_CF = F.silu(gate_CF)
            grad_w2_DF.addmm_(grad_CD.T, silu_CF * up_CF)
            grad_hidden_CF = grad_CD.mm(w2_DF)
            grad_up_CF = silu_CF.mul_(grad_hidden_CF)
            grad_gate_CF = torch.ops.aten.silu_backward(grad_hidden_CF.mul_(up_CF), gate_CF)
            grad_w1_FD.addmm_(grad_gate_CF.T, x_CD)
            grad_w3_FD.addmm_(grad_up_CF.T, x_CD)
            torch.mm(grad_gate_CF, w1_FD, out=grad_x_TD[rows]).addmm_(grad_up_CF, w3_FD)
        return grad_x_TD.view(grads[0].shape), grad_w1_FD, grad_w2_DF, grad_w3_FD
