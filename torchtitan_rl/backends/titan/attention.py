"""Attention inside documents of a packed row, on the CPU.

torchtitan's own backends that know documents have no CPU kernel (varlen) or no CPU backward (flex).
Documents start where positions are 0, as with those backends.

Shapes: B rows, L tokens, N heads, H elements of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.protocols.module import Module


class DocumentAttention(Module):
    """Scaled dot-product attention under the boolean mask of `document_mask`.

    The parameters' names are torchtitan's: it shards them by name under tensor parallelism.
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
    """[B, 1, L, L], True where the query (dim 2) may see the key (dim 3)."""
    documents_BL = (positions_BL == 0).cumsum(dim=1)
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return same_BLL.tril()[:, None]
