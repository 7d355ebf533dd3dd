"""Layers that torchtitan lacks: document attention on the CPU, rotary embeddings of Llama 3.1.

Shapes: B rows, L tokens, N heads, H elements of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.models.common import CosSinRoPE
from torchtitan.protocols.module import Module


class DocumentAttention(Module):
    """Scaled dot-product attention under the boolean mask of `document_mask`.

    torchtitan's backends that handle documents have no CPU kernel (varlen) or no CPU backward pass
    (flex). Parameter names are torchtitan's, which shards by name under tensor parallelism.
    """

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
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        out_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNLH.transpose(1, 2)


def document_mask(positions_BL: torch.Tensor) -> torch.Tensor:
    """[B, 1, L, L], True where the query (dim 2) may see the key (dim 3). As in torchtitan's
    backends, a document starts where the position is 0."""
    documents_BL = (positions_BL == 0).cumsum(dim=1)
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return same_BLL.tril()[:, None]


class ScaledRoPE(CosSinRoPE):
    """Cosines and sines [max_seq_len, 2 * dim], also with ``scaling="llama"``.

    torchtitan has Llama's frequency scaling only for its other layout (adjacent pairs), which needs
    the permutation of weights that `PolicyModel` avoids.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

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
