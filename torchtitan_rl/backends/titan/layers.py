"""torchtitan's norms and rotary embeddings, in fewer passes over memory on the CPU, and with the
frequencies of Llama 3.1.

PyTorch has no fused kernels for them on the CPU: norms and rotations were a fifth of a step of a
small policy, most of it in backward passes that autograd composes from single operations. Compiled
models and tensors that are split over ranks take torchtitan's way.

Shapes: H elements that are normalized or rotated together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.nn_modules import RMSNorm

_BLOCK_ELEMENTS = 1 << 17  # for each thread: 512 KiB


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
        x_TH = x.reshape(-1, x.shape[-1])
        out_TH = torch.empty_like(x_TH)
        scale_T1 = x.new_empty(len(x_TH), 1)
        for rows in blocks(x_TH):
            mean_C1 = torch.linalg.vector_norm(x_TH[rows], dim=1, keepdim=True).square_()
            scale_C1 = torch.rsqrt(mean_C1.div_(x.shape[-1]).add_(eps), out=scale_T1[rows])
            torch.mul(x_TH[rows], scale_C1, out=out_TH[rows]).mul_(weight_H)
        ctx.save_for_backward(x_TH, weight_H, scale_T1)
        return out_TH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # With s the scale and z = grad x weight: s z - x s^3 mean(x z).
        x_TH, weight_H, scale_T1 = ctx.saved_tensors
        grad_TH = grads[0].reshape(x_TH.shape)
        grad_x_TH = torch.empty_like(x_TH)
        grad_weight_1H = torch.zeros_like(weight_H)[None]
        for rows in blocks(x_TH):
            x_CH, grad_CH, scale_C1 = x_TH[rows], grad_TH[rows], scale_T1[rows]
            inner_CH = grad_CH * x_CH
            grad_weight_1H.addmm_(scale_C1.T, inner_CH)
            common_C1 = inner_CH.mv(weight_H)[:, None].mul_(scale_C1.pow(3)).div_(-x_CH.shape[1])
            torch.mul(grad_CH, weight_H, out=grad_x_TH[rows]).mul_(scale_C1).addcmul_(
                x_CH, common_C1
            )
        return grad_x_TH.view(grads[0].shape), grad_weight_1H[0], None


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether what is written for the CPU here can take them."""
    is_split = any(isinstance(x, DTensor) for x in tensors)
    is_cpu = all(x.device.type == "cpu" for x in tensors)
    return is_cpu and not is_split and not torch.compiler.is_compiling()


def blocks(x_TH: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that fit the caches of the cores, several operations on them at a time."""
    size = max(1, _BLOCK_ELEMENTS * torch.get_num_threads() // x_TH.shape[1])
    for start in range(0, len(x_TH), size):
        yield slice(start, start + size)


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
