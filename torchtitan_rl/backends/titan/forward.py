"""Forward pass of one microbatch: logprobs of its entries."""

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
from torchtitan_rl.training.trees import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """E entries of a microbatch; ``sources_E`` are their tokens, as indices into the batch. Without
    any, E is 1: a placeholder with ``is_entry_E`` False, since every rank must run the pass."""

    logprobs_E: torch.Tensor
    entropy_E: torch.Tensor
    is_entry_E: torch.Tensor
    sources_E: npt.NDArray[np.int64]


def forward(
    model: PolicyModel, batch: TrainingBatch, part: Microbatch, layout: Layout
) -> ForwardOutput:
    """Logprobs of the part's entries at the batch's temperature. Collective."""
    sources_E, predecessors_E = part.sources_E, part.predecessors_E
    is_empty = len(sources_E) == 0
    if is_empty:
        sources_E = predecessors_E = np.zeros(1, dtype=np.int64)
    # Entries that share a predecessor (the first tokens of siblings) read the same logits.
    predecessors_S, rows_E = np.unique(predecessors_E, return_inverse=True)
    positions_1T = to_device(part.position_ids_T, layout)[None]
    logits_1SV = model(
        to_device(part.token_ids_T, layout)[None],
        positions_1T,
        model.get_attention_masks(positions_1T, to_device(part.subtree_end_T, layout)),
        to_device(predecessors_S, layout),
    )
    vocab_start = 0
    if isinstance(logits_1SV, DTensor):
        # DTensor splits into chunks of ceil(V / ranks).
        ranks = dist.get_world_size(layout.tensor_group)
        chunk = -(-logits_1SV.shape[-1] // ranks)
        vocab_start = chunk * dist.get_rank(layout.tensor_group)
        logits_1SV = logits_1SV.to_local()
    logprobs_E, entropy_E = selected_logprobs(
        logits_1SV[0],
        to_device(batch.token_ids[sources_E], layout),
        to_device(rows_E, layout),
        temperature=batch.temperature,
        group=layout.tensor_group,
        vocab_start=vocab_start,
    )
    return ForwardOutput(
        logprobs_E=logprobs_E,
        entropy_E=entropy_E,
        is_entry_E=torch.full_like(logprobs_E, not is_empty, dtype=torch.bool),
        sources_E=sources_E,
    )


def to_device(values: npt.NDArray[Any], layout: Layout) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(layout.device)
