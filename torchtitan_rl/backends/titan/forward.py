"""Forward pass of one microbatch: logprobs of selected tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan_rl.backends.titan.model import PolicyModel
from torchtitan_rl.backends.titan.setup import Layout
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.logprobs import selected_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """S selected tokens of a microbatch; ``index_S`` points into its [B * L] tokens. If there are
    none, S is 1: a placeholder with ``is_selected_S`` False, since every rank must run the pass."""

    logprobs_S: torch.Tensor
    entropy_S: torch.Tensor
    index_S: torch.Tensor
    is_selected_S: torch.Tensor


def forward(model: PolicyModel, part: TrainingBatch, layout: Layout) -> ForwardOutput:
    """Logprobs, at the batch's temperature, of the tokens in ``loss_mask``. Collective."""
    positions_BL = to_device(part.position_ids, layout)
    index_S = to_device(part.loss_mask, layout).flatten().nonzero()[:, 0]
    is_selected_S = torch.ones_like(index_S, dtype=torch.bool)
    if index_S.numel() == 0:
        index_S, is_selected_S = index_S.new_zeros(1), is_selected_S.new_zeros(1)
    tokens_BL = to_device(part.token_ids, layout)
    logits_1SV = model(
        tokens_BL,
        positions_BL,
        model.get_attention_masks(positions_BL),
        (index_S - 1).clamp_min(0),  # the logits before a token are its distribution
    )
    vocab_start = 0
    if isinstance(logits_1SV, DTensor):
        # DTensor splits into chunks of ceil(V / ranks).
        ranks = dist.get_world_size(layout.tensor_group)
        chunk = -(-logits_1SV.shape[-1] // ranks)
        vocab_start = chunk * dist.get_rank(layout.tensor_group)
        logits_1SV = logits_1SV.to_local()
    logprobs_S, entropy_S = selected_logprobs(
        logits_1SV[0],
        tokens_BL.flatten()[index_S],
        temperature=part.temperature,
        group=layout.tensor_group,
        vocab_start=vocab_start,
    )
    return ForwardOutput(
        logprobs_S=logprobs_S, entropy_S=entropy_S, index_S=index_S, is_selected_S=is_selected_S
    )


def to_device(rows: npt.NDArray[Any], layout: Layout) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(layout.device)
