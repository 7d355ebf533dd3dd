"""Converts weights between torchtitan's sharded model and Hugging Face directories.

`export_checkpoint` converts a run's checkpoint; it needs no trainer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from torchtitan_rl.backends.titan.checkpoint import (
    SafeLoadPlanner,
    check_metadata,
    checkpoint_lora,
)
from torchtitan_rl.backends.titan.model import LORA_A, LORA_B, PolicyModel
from torchtitan_rl.config.lora import PEFT_PREFIX, LoraConfig, write_adapter
from torchtitan_rl.config.model import FAMILIES, PolicyArchitecture, read_architecture
from torchtitan_rl.errors import CheckpointError, ConfigError, one_line
from torchtitan_rl.training.checkpoint_files import check_contents
from torchtitan_rl.weights.image import TensorPart

# Files that an export does not copy from the source directory: weights of any format, histories.
_NOT_COPIED = (
    *("*.safetensors", "*.bin", "*.index.json", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack"),
    *("*.onnx", "original", ".*"),
)


class PolicyStateDictAdapter(Qwen3StateDictAdapter):
    """Maps names of tensors between torchtitan and Hugging Face checkpoints, for all families."""

    def __init__(self, model_config: PolicyModel.Config) -> None:
        super().__init__(model_config, hf_assets_path=None)
        for family in FAMILIES.values():
            self.from_hf_map |= family.tensor_names


def load_hf(model: PolicyModel, checkpoint_dir: Path) -> None:
    """Load the directory's safetensors into the model; each rank reads its shards. Collective.

    Adapters are not in the directory, and are left as they are.

    Raises:
        ConfigError: the directory has no safetensors file.
    """
    if not any(checkpoint_dir.glob("*.safetensors")):
        raise ConfigError(
            f"policy.checkpoint: {checkpoint_dir} has no *.safetensors file; save the model with "
            "safe_serialization"
        )
    adapter = PolicyStateDictAdapter(model.config)
    hf_state = adapter.to_hf(model.state_dict())
    load(hf_state, storage_reader=adapter.get_hf_storage_reader(str(checkpoint_dir)))
    state = adapter.from_hf(hf_state)
    missing = model.load_state_dict(state, strict=False).missing_keys
    if others := [name for name in missing if not _is_of_adapter(name)]:
        raise RuntimeError(f"{checkpoint_dir} lacks {', '.join(others)}")


def published(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Return the tensors of which a version consists: all weights under Hugging Face names, or the
    adapters under PEFT's. Nothing is copied. A tied head is left out."""
    state = model.state_dict()
    if any(map(_is_of_adapter, state)):
        return peft_names(PolicyStateDictAdapter(model.config), state)
    return whole_weights(model)


def whole_weights(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Return all weights under Hugging Face names, without adapters. Nothing is copied."""
    state: dict[str, torch.Tensor] = PolicyStateDictAdapter(model.config).to_hf(model.state_dict())
    return state


def peft_names(
    adapter: PolicyStateDictAdapter, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the adapters in a state of torchtitan's model by PEFT's names."""
    named: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        for ours, theirs in ((LORA_A, ".lora_A."), (LORA_B, ".lora_B.")):
            if ours in name:
                (layer,) = adapter.to_hf({name.replace(ours, "."): value})
                named[PEFT_PREFIX + theirs.join(layer.rsplit(".", 1))] = value
    return named


def _is_of_adapter(name: str) -> bool:
    return LORA_A in name or LORA_B in name


def hf_state(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return whole tensors in ``dtype`` on the CPU of rank 0, and nothing on other ranks.
    Collective.

    Tensors may share memory with the model, so they are valid only until the model's next step.
    """
    state: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        value = value.detach().to(dtype)  # before the ranks exchange it, and on its device
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            state[name] = whole.cpu().contiguous()
    return state


def hf_parts(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, TensorPart] | None:
    """Return the part of each tensor that this rank writes, in ``dtype``. All ranks together write
    every element once. Not collective. Nothing is copied, so the parts are valid only until the
    model's next step.

    The result is None if a rank's shard is not a box (data and tensor parallelism split the same
    dimension into uneven parts).
    """
    parts: dict[str, TensorPart] = {}
    for index, (name, value) in enumerate(tensors.items()):
        part = _part(value, dtype, index)
        if part is None:
            return None
        parts[name] = part
    return parts


def _part(value: torch.Tensor, dtype: torch.dtype, index: int) -> TensorPart | None:
    """Return this rank's part of one tensor. If several ranks hold the same shard, only one of them
    writes it; the tensor's ``index`` selects this rank, so that the ranks share the work."""
    if not isinstance(value, DTensor):
        is_writer, offset, local = dist.get_rank() == 0, (0,) * value.dim(), value
    else:
        mesh, where = value.device_mesh, value.device_mesh.get_coordinate()
        assert where is not None  # every rank has a share of every tensor
        places = [
            Replicate() if size == 1 else place
            for size, place in zip(mesh.shape, value.placements, strict=True)
        ]
        if not _is_box(value.shape, mesh.shape, places):
            return None
        is_writer = all(
            rank == index % size
            for rank, size, place in zip(where, mesh.shape, places, strict=True)
            if place.is_replicate()
        )
        _, offset = compute_local_shape_and_global_offset(value.shape, mesh, places)
        local = value.to_local()
    return TensorPart(
        shape=value.shape, dtype=dtype, offset=tuple(offset), local=local if is_writer else None
    )


def _is_box(shape: Sequence[int], mesh_shape: Sequence[int], places: Sequence[Placement]) -> bool:
    """Whether each rank's shard is a box of the whole tensor. If data and tensor parallelism split
    the same dimension, the first split is strided. Shards are then boxes only if all have equal
    sizes."""
    ranks: dict[int, int] = {}  # by dimension
    strides: dict[int, int] = {}
    for place, size in zip(places, mesh_shape, strict=True):
        if isinstance(place, Shard | _StridedShard):
            ranks[place.dim] = ranks.get(place.dim, 1) * size
            if isinstance(place, _StridedShard):
                if place.dim in strides:
                    return False
                strides[place.dim] = int(place.split_factor) * size
        elif not place.is_replicate():
            return False
    return all(strides[dim] == ranks[dim] and shape[dim] % ranks[dim] == 0 for dim in strides)


def write_hf(path: Path, state: dict[str, torch.Tensor], *, source: Path) -> None:
    """Write a directory that transformers and vLLM can load: ``state``, with configuration and
    tokenizer files from ``source``. An existing directory is replaced after the new one is
    complete. Not collective."""
    from safetensors.torch import save_file

    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (temporary / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
    weights = temporary / "model.safetensors"
    weights.touch()
    mode = weights.stat().st_mode  # save_file creates a file that only the owner can read
    save_file(state, weights, metadata={"format": "pt"})
    weights.chmod(mode)
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)


def merge_adapters(
    state: dict[str, torch.Tensor], adapters: Mapping[str, torch.Tensor], scaling: float
) -> None:
    """Add adapters, under PEFT's names, to the weights in ``state``, under Hugging Face's."""
    for name, a in adapters.items():
        if ".lora_A." in name:
            weight = name.removeprefix(PEFT_PREFIX).replace(".lora_A.", ".")
            b, whole = adapters[name.replace(".lora_A.", ".lora_B.")], state[weight]
            merged = whole.float() + scaling * (b.float() @ a.float())
            state[weight] = merged.to(whole.dtype)


def write_adapter_folder(
    path: Path, lora: LoraConfig, adapters: Mapping[str, torch.Tensor], *, source: Path
) -> None:
    """Write an adapter's folder. An existing one is replaced after the new one is complete."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_adapter(temporary, lora, adapters, base=str(source))
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)


_MODEL = "model."


def export_checkpoint(
    checkpoint: Path, target: Path, *, source: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    """Write the model of ``checkpoint`` to ``target``, all or nothing. Configuration and tokenizer
    come from ``source``, the initial policy of the run. The whole model must fit into memory.
    Adapters are merged into the weights of ``source``.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or belongs to another policy.
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
    adapter, kind = PolicyStateDictAdapter(model_config), getattr(torch, dtype)
    state = adapter.to_hf(named)
    if (lora := checkpoint_lora(checkpoint)).rank:
        state = {n: one.to(kind) for n, one in _weights(source, architecture).items()}
        try:
            merge_adapters(state, peft_names(adapter, named), lora.scaling)
        except (KeyError, RuntimeError) as error:  # another layer, or another size
            raise CheckpointError(
                f"checkpoint {checkpoint} is not of the policy in {source}: {one_line(error)}"
            ) from error
    embedding = state.get("model.embed_tokens.weight")
    shape = (architecture.vocab_size, architecture.dim)
    if embedding is None or tuple(embedding.shape) != shape:
        raise CheckpointError(f"checkpoint {checkpoint} is not of the policy in {source}")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_hf(target, {name: tensor.to(kind) for name, tensor in state.items()}, source=source)


def _weights(source: Path, architecture: PolicyArchitecture) -> dict[str, torch.Tensor]:
    """Return all weights of a Hugging Face directory, without a tied head."""
    from safetensors.torch import load_file

    state = {
        n: one
        for file in sorted(source.glob("*.safetensors"))
        for n, one in load_file(file).items()
    }
    if architecture.has_tied_embeddings:
        state.pop("lm_head.weight", None)
    return state
