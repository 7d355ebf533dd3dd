"""Layers that call vLLM's fused CPU kernels instead of many PyTorch operations.

vLLM builds these kernels for every CPU, but does not use them on x86. With them the tiny policy
decodes 5 % (one core) to 9 % (two cores) faster with 64 running requests, and 14 % faster in small
batches. Importing this module imports vLLM.

Invariant: a kernel is called only with float32 rows that are contiguous (a kernel ignores strides)
and whose length is a multiple of the vector size. Other sizes and dtypes are computed as in vLLM.
"""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import CustomOp, maybe_get_oot_by_class
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.sample import rejection_sampler

_VECTOR_ITEMS = 16
_DTYPE = torch.float32


def use_cpu_kernels() -> None:
    """Make every engine that is built after this call use these layers."""
    for layer, replacement in (
        (RMSNorm, KernelRMSNorm),
        (SiluAndMul, KernelSiluAndMul),
        (RotaryEmbedding, FlatRotaryEmbedding),
    ):
        if maybe_get_oot_by_class(layer) is layer:
            CustomOp.register_oot(replacement, name=layer.__name__)
    rejection_sampler.expand_batch_to_tokens = _expand


def _expand(
    x_R: torch.Tensor,
    ends_R: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's parameter for its drafted tokens, as vLLM's GPU kernel does. ``ends_R``
    are the cumulative numbers of these. vLLM's CPU kernel writes the result into a converted copy,
    unless it has 64-bit integers: temperatures of drafted tokens would be arbitrary memory."""
    counts_R = ends_R.diff(prepend=ends_R.new_zeros(1))
    x_R = torch.where(x_R == replace_from, replace_to, x_R)
    return x_R.repeat_interleave(counts_R, output_size=num_tokens)


class KernelRMSNorm(RMSNorm):
    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """With a residual, both tensors are written in place, as vLLM's GPU kernels do."""
        is_plain = self.has_weight and self.variance_size_override is None
        is_in_dtype = x.dtype == self.weight.dtype == _DTYPE
        if not is_plain or not is_in_dtype or x.shape[-1] % _VECTOR_ITEMS:
            return self.forward_native(x, residual)
        x = x.contiguous()  # heads are slices of a joint projection
        if residual is None:
            result = torch.empty_like(x)
            torch.ops._C.rms_norm(result, x, self.weight, self.variance_epsilon)
            return result
        residual = residual.contiguous()
        torch.ops._C.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return x, residual


class KernelSiluAndMul(SiluAndMul):
    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1] // 2
        if x.dtype != _DTYPE or size % _VECTOR_ITEMS:
            return self.forward_native(x)
        result = x.new_empty(*x.shape[:-1], size)
        torch.ops._C.silu_and_mul(result, x.contiguous())
        return result


class FlatRotaryEmbedding(RotaryEmbedding):
    def forward_cpu(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Give vLLM's CPU kernel all heads of a token in one row. Of tensors [T, heads, size]
        (DeepSeek-V3) it takes each head for a token, and rotates by wrong positions."""
        of_query, of_key = super().forward_cpu(
            positions, query.flatten(1), None if key is None else key.flatten(1)
        )
        return of_query.view(query.shape), None if key is None else of_key.view(key.shape)
