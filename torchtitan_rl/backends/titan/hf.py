"""Converts weights between torchtitan's sharded model and Hugging Face directories."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

from torchtitan_rl.backends.titan.checkpoint import SafeLoadPlanner, check_metadata, checkpoint_lora
from torchtitan_rl.backends.titan.model import LORA_A, LORA_B, PolicyModel
from torchtitan_rl.config.lora import ADAPTER_FOLDER, PEFT_PREFIX, LoraConfig, write_adapter
from torchtitan_rl.config.model import FAMILIES, PolicyArchitecture, read_architecture
from torchtitan_rl.errors import CheckpointError, ConfigError, one_line
from torchtitan_rl.images import image_reader
from torchtitan_rl.training.checkpoint_files import check_contents
from torchtitan_rl.weights.image import TensorPart

# Files that an export does not copy from the source directory: weights of any format, histories.
_NOT_COPIED = (
    *("*.safetensors", "*.bin", "*.index.json", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack"),
    *("*.onnx", "original", ".*"),
)


class PolicyStateDictAdapter(Qwen3StateDictAdapter):
    """Maps names of tensors between torchtitan and Hugging Face checkpoints, for all families.

    Tensors that hold all experts of a layer keep their name and value; `expert_names` has the names
    of their parts. (torchtitan's adapter returns only the experts of one rank, and refuses layouts
    with copies.) Those of a vision tower have the same names on both sides.
    """

    def __init__(self, model_config: PolicyModel.Config) -> None:
        super().__init__(model_config, hf_assets_path=None)
        for family in FAMILIES.values():  # "q_proj" is another tensor with latent attention
            if family.has_latent_attention == (model_config.latent is not None):
                self.from_hf_map |= family.tensor_names

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in state_dict.items() if _KEPT.match(name)}
        others = {name: value for name, value in state_dict.items() if name not in kept}
        return {**super().to_hf(others), **kept}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in hf_state_dict.items() if _KEPT.match(name)}
        others = {name: value for name, value in hf_state_dict.items() if name not in kept}
        return {**super().from_hf(others), **kept}

    def is_of_model(self, name: str) -> bool:
        """Whether the model has the tensor ``name`` of a Hugging Face checkpoint. It has no layers
        that predict several tokens (MTP), which are numbered after the others."""
        if name.startswith(VISION_TOWER):
            return self.model_config.vision is not None
        is_tied_head = name == "lm_head.weight" and self.model_config.enable_weight_tying
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if is_tied_head or (layer and int(layer[1]) >= len(self.model_config.layers)):
            return False
        return self.from_hf_map.get(re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)) is not None


VISION_TOWER = "visual."
_EXPERTS = re.compile(r"layers\.(\d+)\.moe\.routed_experts\.inner_experts\.(w[123])_")
_KEPT = re.compile(rf"{VISION_TOWER}|{_EXPERTS.pattern}")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def expert_names(name: str, number: int) -> list[str] | None:
    """Return the Hugging Face names of the ``number`` experts that the tensor ``name`` of our model
    holds; None for other tensors."""
    found = _EXPERTS.match(name)
    if found is None:
        return None
    prefix, projection = f"model.layers.{found[1]}.mlp.experts", _PROJECTIONS[found[2]]
    return [f"{prefix}.{expert}.{projection}.weight" for expert in range(number)]


def load_hf(model: PolicyModel, checkpoint_dir: Path) -> set[str]:
    """Load the directory's safetensors into the model, and what reads images for it; each rank
    reads its shards. Collective. Return the names of the tensors in the files that are published.
    Adapters are left as they are.

    Raises:
        ConfigError: the directory has no safetensors file, or an expert is not in them.
    """
    from safetensors import safe_open

    files = sorted(checkpoint_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"policy.checkpoint: {checkpoint_dir} has no *.safetensors file; save the model with "
            "safe_serialization"
        )
    adapter = PolicyStateDictAdapter(model.config)
    if model.config.vision is not None:
        model.reader = image_reader(checkpoint_dir)
    hf_state = adapter.to_hf(model.state_dict())
    grouped = {name: hf_state.pop(name) for name in list(hf_state) if _EXPERTS.match(name)}
    load(hf_state, storage_reader=adapter.get_hf_storage_reader(str(checkpoint_dir)))
    with contextlib.ExitStack() as stack:
        where: dict[str, Any] = {}
        for path in files:
            file = stack.enter_context(safe_open(path, "pt"))
            where |= dict.fromkeys(file.keys(), file)
        for name, value in grouped.items():
            _read_experts(name, value, where)
    state = adapter.from_hf({**hf_state, **grouped})
    missing = model.load_state_dict(state, strict=False).missing_keys
    if others := [name for name in missing if not _is_of_adapter(name)]:
        raise RuntimeError(f"{checkpoint_dir} lacks {', '.join(others)}")
    return {n for n in where if adapter.is_of_model(n) and n not in _frozen(model)}


def _read_experts(name: str, value: torch.Tensor, where: Mapping[str, Any]) -> None:
    """Read this rank's shard of the experts in one tensor, from the open file of each."""
    shard, names = _shard(value), expert_names(name, value.shape[0])
    assert names is not None
    if shard is None:
        raise ConfigError("trainer: the ranks do not divide the policy's experts evenly")
    if missing := [one for one in names if one not in where]:
        raise ConfigError(f"policy.checkpoint: the files have no tensor {missing[0]}")
    first, *others = shard.offset
    for index, own in enumerate(shard.local, start=first):
        box = tuple(slice(at, at + n) for at, n in zip(others, own.shape, strict=True))
        own.copy_(where[names[index]].get_slice(names[index])[box])


def published(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Return the tensors of which a version consists: all weights under Hugging Face names, or the
    adapters under PEFT's. Nothing is copied. A tied head and a frozen vision tower are left out."""
    state = model.state_dict()
    if any(map(_is_of_adapter, state)):
        return peft_names(PolicyStateDictAdapter(model.config), state)
    frozen = _frozen(model)
    return {name: value for name, value in whole_weights(model).items() if name not in frozen}


def _frozen(model: PolicyModel) -> set[str]:
    """Return the names of the vision tower's tensors that are not trained."""
    named = model.named_parameters()
    return {n for n, one in named if n.startswith(VISION_TOWER) and not one.requires_grad}


def whole_weights(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Return all weights under Hugging Face names, without adapters; no copies."""
    return PolicyStateDictAdapter(model.config).to_hf(model.state_dict())


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
    Collective. They may share memory with the model, so they are valid only until its next step."""
    state: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        # Before the ranks exchange it, and on its device.
        value = value.detach().to(_written_as(name, dtype))
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            state |= _named(name, whole.cpu().contiguous())
    return state


def _written_as(name: str, dtype: torch.dtype) -> torch.dtype:
    """Biases of experts stay in float32, as in checkpoints and engines: to compare scores, bfloat16
    is too coarse."""
    return torch.float32 if name.endswith(".e_score_correction_bias") else dtype


def hf_names(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the tensors of `hf_state`, on every rank."""
    named = (expert_names(name, value.shape[0]) or [name] for name, value in tensors.items())
    return {name for names in named for name in names}


def _named(name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    names = expert_names(name, len(whole))
    return {name: whole} if names is None else dict(zip(names, whole.unbind(), strict=True))


def hf_parts(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, TensorPart] | None:
    """Return the part of each tensor that this rank writes, in ``dtype``; all ranks together write
    every element once. Nothing is copied, so the parts are valid only until the model's next step.
    None if a rank's shard is not a box (data and tensor parallelism split the same dimension into
    uneven parts)."""
    parts: dict[str, TensorPart] = {}
    for index, (name, value) in enumerate(tensors.items()):
        shard = _shard(value)
        if shard is None:
            return None
        # Of the ranks with the same shard, the index selects one, so that they share the work.
        writes = all(place == index % size for place, size in shard.copies)
        names = expert_names(name, value.shape[0])
        if names is None:
            local = shard.local if writes else None
            kind = _written_as(name, dtype)
            parts[name] = TensorPart(
                shape=value.shape, dtype=kind, offset=shard.offset, local=local
            )
            continue
        first, *others = shard.offset
        own = dict(zip(names[first:], shard.local if writes else (), strict=False))
        for one in names:
            parts[one] = TensorPart(
                shape=value.shape[1:], dtype=dtype, offset=tuple(others), local=own.get(one)
            )
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """This rank's shard of a tensor, a box. ``copies``: for each dimension of the mesh that copies
    shards, this rank's place in it and its size."""

    local: torch.Tensor
    offset: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


def _shard(value: torch.Tensor) -> _Shard | None:
    if isinstance(value, DTensor) and value.device_mesh.size() < dist.get_world_size():
        assert all(placement.is_replicate() for placement in value.placements)
        value = value.to_local()  # the biases of experts are copied in a mesh of one dimension only
    if not isinstance(value, DTensor):
        of_rank_0 = ((dist.get_rank(), 1),)
        return _Shard(local=value, offset=(0,) * value.dim(), copies=of_rank_0)
    mesh, where = value.device_mesh, value.device_mesh.get_coordinate()
    assert where is not None  # every rank has a share of every tensor
    places = [
        Replicate() if size == 1 else place
        for size, place in zip(mesh.shape, value.placements, strict=True)
    ]
    if not _is_box(value.shape, mesh.shape, places):
        return None
    _, offset = compute_local_shape_and_global_offset(value.shape, mesh, places)
    return _Shard(
        local=value.to_local(),
        offset=tuple(offset),
        copies=tuple(
            (rank, size)
            for rank, size, place in zip(where, mesh.shape, places, strict=True)
            if place.is_replicate()
        ),
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
    config |= {"dtype": dtype}
    if "num_nextn_predict_layers" in config:  # such layers are neither trained nor written
        config["num_nextn_predict_layers"] = 0
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
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


def export(
    model: PolicyModel, path: Path, lora: LoraConfig, *, source: Path, dtype: torch.dtype
) -> None:
    """Write the model's weights, in ``dtype``, by `write_hf`. Adapters are merged into them, and
    are also written to the folder ``adapter`` next to it, in float32. Collective."""
    state = hf_state(whole_weights(model), dtype)
    adapters = hf_state(published(model), torch.float32) if lora.rank else {}
    try:
        if dist.get_rank() == 0:
            if adapters:
                write_adapter_folder(path.with_name(ADAPTER_FOLDER), lora, adapters, source=source)
                merge_adapters(state, adapters, lora.scaling)
            write_hf(path, state, source=source)
    finally:
        dist.barrier()


def write_adapter_folder(
    path: Path, lora: LoraConfig, adapters: Mapping[str, torch.Tensor], *, source: Path
) -> None:
    """Write an adapter's folder, in place of an existing one."""
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
    model_config: Any = SimpleNamespace(
        enable_weight_tying=architecture.has_tied_embeddings, latent=architecture.latent
    )
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
    tensors = {one: t for name, whole in state.items() for one, t in _named(name, whole).items()}
    written = {name: tensor.to(_written_as(name, kind)) for name, tensor in tensors.items()}
    write_hf(target, written, source=source)


def _weights(source: Path, architecture: PolicyArchitecture) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        state |= load_file(file)
    if architecture.has_tied_embeddings:
        state.pop("lm_head.weight", None)
    return state
