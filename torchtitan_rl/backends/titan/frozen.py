"""Frozen models in the trainer, split as the policy is: the reference of the KL penalty, and the
teachers of distillation over the whole vocabulary.

Shapes: S rows of logits, D model dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from torchtitan_rl.backends.titan.hf import load_hf
from torchtitan_rl.backends.titan.model import PolicyModel, adapter_layers, build_policy
from torchtitan_rl.backends.titan.setup import Layout, local, to_device
from torchtitan_rl.backends.titan.vision import rope_positions
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.training.logprobs import TaughtRows
from torchtitan_rl.training.trees import Microbatch


def load_reference(
    source: Path, config: TrainerConfig, layout: Layout, *, policy: PolicyModel, dtype: str
) -> PolicyModel | None:
    """Load the initial policy as a second, frozen model: the reference of the KL penalty or of DPO.
    None if the loss needs none. With adapters it is the policy itself, with its adapters off
    (`without_adapters`). Collective."""
    if not config.loss.needs_reference:
        return None
    return policy if any(adapter_layers(policy)) else load_frozen(source, config, layout, dtype)


def load_frozen(source: Path, config: TrainerConfig, layout: Layout, dtype: str) -> PolicyModel:
    """Load a frozen model, in the policy's parallel layout. Collective."""
    model = build_policy(read_architecture(source), config, layout, dtype=dtype)
    load_hf(model, source)
    return model.requires_grad_(False)


def taught_rows(
    teachers: Sequence[PolicyModel],
    part: Microbatch,
    predecessors_S: npt.NDArray[np.int64],
    teachers_S: npt.NDArray[np.int64],
    layout: Layout,
) -> Iterator[TaughtRows]:
    """Run the teachers, up to their heads, which then compute the logits of parts of the rows.
    ``teachers_S`` are the numbers of the rows' teachers, ascending. Collective: all ranks run all
    teachers. The caller reshards the heads."""
    positions_1T = to_device(part.position_ids_T, layout)[None]
    subtree_end_T = to_device(part.subtree_end_T, layout)
    for number, teacher in enumerate(teachers):
        own = slice(*np.searchsorted(teachers_S, [number, number + 1]).tolist())
        with torch.no_grad():
            hidden_1SD = teacher(
                to_device(part.token_ids_T, layout)[None],
                to_device(rope_positions(part, teacher.reader), layout)[None],
                teacher.get_attention_masks(positions_1T, subtree_end_T),
                to_device(predecessors_S[own], layout),
                has_head=False,
            )
        teacher.lm_head.unshard()
        logits = partial(_logits, hidden_1SD[0], local(teacher.lm_head.weight))
        if own.stop > own.start:
            yield TaughtRows(rows=own, logits=logits)


def _logits(hidden_SD: torch.Tensor, weight_VD: torch.Tensor, rows: slice) -> torch.Tensor:
    return F.linear(hidden_SD[rows], weight_VD)
