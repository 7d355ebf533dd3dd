"""A checkpoint of a run as a Hugging Face directory, without the trainer that wrote it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from torchtitan_rl.backends.titan.checkpoint_pickles import SafeLoadPlanner, check_metadata
from torchtitan_rl.backends.titan.hf import PolicyStateDictAdapter, write_hf
from torchtitan_rl.config.hf_model import read_architecture
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training.checkpoint_files import check_contents

_MODEL = "model."


def export_checkpoint(
    checkpoint: Path, target: Path, *, source: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    """Write the model of ``checkpoint`` to ``target``, all or nothing, with configuration and
    tokenizer of ``source``, the policy that the run began with. Holds the model in memory.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or not of that policy.
    """
    check_contents(checkpoint)
    check_metadata(checkpoint)
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in stored.items()
        if name.startswith(_MODEL) and isinstance(one, TensorStorageMetadata)
    }
    try:
        load(tensors, checkpoint_id=checkpoint, planner=SafeLoadPlanner(), no_dist=True)
    except CheckpointException as error:  # no subclass of Exception
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {error}") from error
    architecture = read_architecture(source)
    model_config: Any = SimpleNamespace(enable_weight_tying=architecture.has_tied_embeddings)
    named = {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}
    state = PolicyStateDictAdapter(model_config).to_hf(named)
    embedding = state.get("model.embed_tokens.weight")
    shape = (architecture.vocab_size, architecture.dim)
    if embedding is None or tuple(embedding.shape) != shape:
        raise CheckpointError(f"checkpoint {checkpoint} is not of the policy in {source}")
    kind = getattr(torch, dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_hf(target, {name: tensor.to(kind) for name, tensor in state.items()}, source=source)
