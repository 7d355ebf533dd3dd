"""torchtitan's SwiGLU layer on the CPU, in fewer passes over its hidden values, the largest tensors
of a step. Two of them are kept for the backward pass, where autograd keeps four.

Shapes: T tokens, D model dimension, F hidden dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchtitan_rl.backends.titan.layers import is_plain

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
        gate_TF, up_TF = x_TD.mm(w1_FD.T), x_TD.mm(w3_FD.T)
        ctx.save_for_backward(x_TD, w1_FD, w2_DF, w3_FD, gate_TF, up_TF)
        return F.silu(gate_TF).mul_(up_TF).mm(w2_DF.T).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_TD, w1_FD, w2_DF, w3_FD, gate_TF, up_TF = ctx.saved_tensors
        grad_TD = grads[0].reshape(x_TD.shape)
        silu_TF = F.silu(gate_TF)
        grad_w2_DF = grad_TD.T.mm(silu_TF * up_TF)
        grad_hidden_TF = grad_TD.mm(w2_DF)
        grad_up_TF = silu_TF.mul_(grad_hidden_TF)
        grad_gate_TF = torch.ops.aten.silu_backward(grad_hidden_TF.mul_(up_TF), gate_TF)
        grad_x_TD = grad_gate_TF.mm(w1_FD).addmm_(grad_up_TF, w3_FD)
        grad_w1_FD, grad_w3_FD = grad_gate_TF.T.mm(x_TD), grad_up_TF.T.mm(x_TD)
        return grad_x_TD.view(grads[0].shape), grad_w1_FD, grad_w2_DF, grad_w3_FD
