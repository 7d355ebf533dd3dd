"""torchtitan's norms, rotary embeddings and SwiGLU layers in fewer passes over memory on the CPU;
the rotary embeddings also with the frequencies of Llama 3.1.

PyTorch has no fused kernels for them on the CPU. Norms and rotations were a fifth of a step of a
small policy, most of it in backward passes that autograd composes from single operations. The
SwiGLU layer keeps two of its hidden values, the largest tensors of a step, for the backward pass;
autograd keeps four. Compiled models and tensors that are split over ranks use torchtitan's layers.

Shapes: H elements normalized or rotated together, T tokens, D model dimension, F hidden dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.models.common import CosSinRoPE, FeedForward
from torchtitan.models.common.nn_modules import RMSNorm


class CpuRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) x weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_plain(x):
            composed: torch.Tensor = super().forward(x)
            return composed
        normed: torch.Tensor = _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, scale)
        return (x * scale).mul_(weight_H)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # With s the scale and z = grad x weight: s z - x s^3 mean(x z).
        x, weight_H, scale = ctx.saved_tensors
        size = x.shape[-1]
        inner = (grads[0] * x).reshape(-1, size)
        grad_weight_H = scale.reshape(1, -1).mm(inner)[0]
        common = inner.mv(weight_H).reshape(scale.shape).mul_(scale.pow(3)).div_(-size)
        return (grads[0] * weight_H).mul_(scale).addcmul_(x, common), grad_weight_H, None


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether the operations here can take them."""
    are_on_cpu = all(x.device.type == "cpu" for x in tensors)
    are_split = any(isinstance(x, DTensor) for x in tensors)
    return are_on_cpu and not are_split and not torch.compiler.is_compiling()


class ScaledRoPE(CosSinRoPE):
    """Cosines and sines [max_seq_len, 2 * dim], also with ``scaling="llama"``.

    torchtitan has Llama's frequency scaling only for its other layout (adjacent pairs), which needs
    the permutation of weights that `PolicyModel` avoids.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_plain(query):
            rotated: tuple[torch.Tensor, torch.Tensor] = CosSinRoPE.apply_rotary_emb(
                query, key, rope_cache
            )
            return rotated
        cosine, sine = rope_cache.chunk(2, dim=-1)
        return (
            _Rotation.apply(query, cosine, sine),  # type: ignore[no-untyped-call]
            _Rotation.apply(key, cosine, sine),  # type: ignore[no-untyped-call]
        )

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        if config.scaling != "llama":
            cache: torch.Tensor = super()._precompute_cache()
            return cache
        frequencies = config.theta ** -(torch.arange(0, config.dim, 2).float() / config.dim)
        # Llama 3.1 slows long wavelengths down by the factor and keeps short ones; in between it
        # interpolates by the number of rotations within the original context.
        rotations = config.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (rotations - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        kept = kept.clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / config.scaling_factor)
        positions = torch.arange(config.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


class _Rotation(torch.autograd.Function):
    """The halves of a head are the two coordinates; the gradient is rotated back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotate(grads[0], *ctx.saved_tensors, back=True), None, None


def _rotate(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, back: bool
) -> torch.Tensor:
    out = x * cosine
    (x1, x2), (s1, s2) = x.chunk(2, dim=-1), sine.chunk(2, dim=-1)
    (out1, out2), sign = out.chunk(2, dim=-1), 1 if back else -1
    out1.addcmul_(x2, s1, value=sign)
    out2.addcmul_(x1, s2, value=-sign)
    return out


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
