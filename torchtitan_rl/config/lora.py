"""Low-rank adapters (LoRA): their options, names and sizes, and their folders in PEFT's format.

An adapter adds ``alpha / rank * B A x`` to the output of a linear layer (Hu et al. 2021,
2106.09685); A is [rank, in] and B is [out, rank]. B is zero at first, so the initial policy is the
base. Names of tensors are those of PEFT, and a folder holds ``adapter_config.json`` and
``adapter_model.safetensors``, which PEFT, transformers and vLLM load. `read_adapter` checks folders
that may come from others; it reads no pickle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from torchtitan_rl.bounds import PositiveFloat
from torchtitan_rl.config.model import PolicyArchitecture
from torchtitan_rl.files import parse_object

if TYPE_CHECKING:
    import torch

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"  # of a run, next to its exported policy
PEFT_PREFIX = "base_model.model."
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's LoRAConfig.max_lora_rank


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Train low-rank adapters on a frozen policy in place of all its weights (LoRA). Only the
    adapters are published, checkpointed and kept by the optimizer."""

    rank: Annotated[int, Interval(ge=0, le=ENGINE_RANKS[-1])] = 0
    """Rank of the adapters; 0 trains all weights. The learning rate of adapters is about ten times
    that of all weights."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is scaled by ``alpha / rank``."""
    target_modules: tuple[Target, ...] = TARGETS
    """Linear layers that get adapters, by their names in Hugging Face checkpoints. ``k_proj`` and
    ``v_proj`` go together."""

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def lora_errors(lora: LoraConfig) -> list[str]:
    """One message per error: field, value, fix."""
    targets = lora.target_modules
    name = f"policy.lora.target_modules is {' '.join(targets) or 'empty'}"
    if not lora.rank:
        return []
    if not targets:
        return [f"{name}: give some of {' '.join(TARGETS)}"]
    if len(set(targets)) < len(targets):
        return [f"{name}: give each layer once"]
    if ("k_proj" in targets) != ("v_proj" in targets):
        return [f"{name}: k_proj and v_proj have one configuration; give both or neither"]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSlots:
    """Room in an engine for the adapters of ``number`` training runs, each of at most ``rank``. A
    run has two slots, see `tenancy/server.py`."""

    number: int
    rank: int

    @property
    def num_slots(self) -> int:
        return 2 * self.number

    def pairs(self) -> list[tuple[int, int]]:
        """The slots of each run."""
        return [(2 * one, 2 * one + 1) for one in range(self.number)]


def slot_adapter(slot: int, published: int) -> str:
    """The name of what the server published as version ``published`` into a slot."""
    return f"{slot}@{published}"


_ALPHA = "alpha"


def slot_tensors(
    slot: int, lora: LoraConfig, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What is published to load an adapter into a slot."""
    import torch

    alpha = torch.tensor([lora.alpha], dtype=torch.float64)
    return {f"{slot}/{name}": one for name, one in {**tensors, _ALPHA: alpha}.items()}


def read_slot(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[int, LoraConfig, dict[str, torch.Tensor]]:
    """Reverse `slot_tensors`."""
    slots, names = zip(*(name.split("/", 1) for name in tensors), strict=True)
    own = dict(zip(names, tensors.values(), strict=True))
    alpha = float(own.pop(_ALPHA).item())
    targets = {name.split(".")[-3] for name in own}
    rank = next(one.shape[0] for name, one in own.items() if name.endswith("lora_A.weight"))
    lora = LoraConfig(
        rank=rank, alpha=alpha, target_modules=tuple(one for one in TARGETS if one in targets)
    )
    return int(slots[0]), lora, own


def engine_rank(rank: int) -> int:
    """The smallest rank that vLLM allocates and that holds adapters of ``rank``."""
    return next(one for one in ENGINE_RANKS if one >= rank)


def adapter_shapes(
    architecture: PolicyArchitecture, lora: LoraConfig
) -> dict[str, tuple[int, int]]:
    """The shapes of all tensors of an adapter, by PEFT's names."""
    a = architecture
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    sizes = {  # module, in, out
        "q_proj": ("self_attn", a.dim, queries),
        "k_proj": ("self_attn", a.dim, keys),
        "v_proj": ("self_attn", a.dim, keys),
        "o_proj": ("self_attn", queries, a.dim),
        "gate_proj": ("mlp", a.dim, a.hidden_dim),
        "up_proj": ("mlp", a.dim, a.hidden_dim),
        "down_proj": ("mlp", a.hidden_dim, a.dim),
    }
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(a.num_layers):
        for target in lora.target_modules:
            module, size_in, size_out = sizes[target]
            name = f"{PEFT_PREFIX}model.layers.{layer}.{module}.{target}"
            shapes[f"{name}.lora_A.weight"] = (lora.rank, size_in)
            shapes[f"{name}.lora_B.weight"] = (size_out, lora.rank)
    return shapes


def num_adapter_weights(architecture: PolicyArchitecture, lora: LoraConfig) -> int:
    """The number of trained weights."""
    return sum(rows * columns for rows, columns in adapter_shapes(architecture, lora).values())


def write_adapter(
    folder: Path, lora: LoraConfig, tensors: Mapping[str, torch.Tensor], *, base: str
) -> None:
    """Write an adapter into an existing folder. ``base``: the model that it was trained on."""
    from safetensors.torch import save_file

    document: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(document, indent=2) + "\n")
    weights = folder / ADAPTER_WEIGHTS
    weights.touch()
    mode = weights.stat().st_mode  # save_file creates a file that only the owner can read
    save_file(dict(tensors), weights, metadata={"format": "pt"})
    weights.chmod(mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """An adapter that is served under a name. Its rank is the largest of its layers' ranks."""

    name: str
    path: Path
    rank: int
    targets: tuple[str, ...]


def largest_rank(adapters: Sequence[AdapterFolder]) -> int:
    """The rank that an engine allocates for each of its adapters; 0 without any."""
    return engine_rank(max(one.rank for one in adapters)) if adapters else 0


_UNSERVED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_bdlora",
    "use_qalora",
)
# Those that leave the base as it is. Others, such as pissa, change it when PEFT loads an adapter.
_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
# Of weights and of alpha. An adapter that computes infinity or NaN spoils the requests of others:
# on a CPU, vLLM's attention reads what earlier requests have left in the cache's blocks.
MOST = 1e4
_TENSOR = re.compile(r"(?P<layer>.*\.(?P<target>[^.]+))\.lora_(?P<matrix>[AB])\.weight")


def read_adapters(
    named: Sequence[str], policy: PolicyArchitecture | None, *, model_name: str
) -> tuple[tuple[AdapterFolder, ...], list[str]]:
    """Read the adapters given as ``NAME=DIR``, and check them against the served policy (None: its
    sizes are not known). Returns those without errors, and one message per error."""
    found: list[AdapterFolder] = []
    errors: list[str] = []
    if named and policy is not None and policy.experts is not None:
        return (), ["adapters: a model with experts is served without adapters; leave them out"]
    for text in named:
        name, is_given, folder = text.partition("=")
        try:
            if not is_given or not name.strip() or not folder:
                raise ValueError("give NAME=DIR, such as sql=outputs/run/adapter")
            if not _NAME.fullmatch(name):
                raise ValueError("a name has letters, digits and ._:/-, at most 128 of them")
            if name == model_name:
                raise ValueError("endpoint.model_name has that name; give another")
            if any(name == one.name for one in found):
                raise ValueError("the name is given twice; give each adapter a name of its own")
            found.append(_read_adapter(name, Path(folder).absolute(), policy))
        except (OSError, ValueError) as error:
            errors.append(f"adapters has {text!r}: {error}")
    return tuple(found), errors


def _read_adapter(name: str, folder: Path, policy: PolicyArchitecture | None) -> AdapterFolder:
    """Raises OSError or ValueError if the folder has no adapter that fits the policy."""
    from safetensors import SafetensorError, safe_open

    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} has no {file}; give a folder that PEFT or a run wrote")
    document = parse_object(ADAPTER_CONFIG, (folder / ADAPTER_CONFIG).read_bytes())
    if document.get("peft_type") != "LORA" or document.get("bias", "none") != "none":
        raise ValueError(f"{ADAPTER_CONFIG} is not of LoRA without biases")
    if used := [one for one in _UNSERVED if document.get(one)]:
        raise ValueError(f"{ADAPTER_CONFIG} has {', '.join(used)}, which is not served")
    init = document.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _INITS:
        raise ValueError(
            f"{ADAPTER_CONFIG} has init_lora_weights {init!r}, with which PEFT changes the model; "
            "convert it to a plain adapter with PEFT"
        )
    if not _is_positive(alpha := document.get("lora_alpha")):
        raise ValueError(
            f"{ADAPTER_CONFIG} has lora_alpha {alpha!r}; it must be above 0, and at most {MOST:g}"
        )
    for name_of in ("rank_pattern", "alpha_pattern"):
        pattern = document.get(name_of) or {}
        if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
            raise ValueError(f"{ADAPTER_CONFIG} has {name_of} {pattern!r}; give numbers above 0")
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            for tensor in file.keys():  # noqa: SIM118
                values = file.get_tensor(tensor)
                shapes[tensor] = tuple(values.shape)
                if not values.is_floating_point() or not (values.abs() <= MOST).all():
                    raise ValueError(
                        f"{tensor} has values that are no floats up to {MOST:g}; if the training "
                        "has diverged, give an earlier adapter"
                    )
    except SafetensorError as error:
        raise ValueError(f"{ADAPTER_WEIGHTS} is damaged or not complete: {error}") from error
    ranks, targets = _ranks_and_targets(shapes, policy)
    given = document.get("r")
    all_ranks = {*ranks, given if isinstance(given, int) else 0}
    if not targets or not 1 <= min(all_ranks) <= max(all_ranks) <= ENGINE_RANKS[-1]:
        raise ValueError(f"its rank is {given}; vLLM serves ranks of 1 to {ENGINE_RANKS[-1]}")
    if ranks != {given} and not document.get("rank_pattern"):  # would be scaled by another rank
        raise ValueError(f"its rank is {given}, and its matrices have rank {min(ranks - {given})}")
    return AdapterFolder(
        name=name, path=folder, rank=max(all_ranks), targets=tuple(sorted(targets))
    )


def _is_positive(value: object) -> bool:
    """Whether it is a number, above 0 and at most `MOST`."""
    return type(value) in (int, float) and 0 < value <= MOST  # type: ignore[operator]


def _ranks_and_targets(
    shapes: Mapping[str, tuple[int, ...]], policy: PolicyArchitecture | None
) -> tuple[set[int], set[str]]:
    """Raises ValueError if the tensors are no pairs of matrices, or do not fit the layers."""
    ranks, targets = set[int](), set[str]()
    expected = {} if policy is None else adapter_shapes(policy, LoraConfig(rank=1))
    for tensor, shape in shapes.items():
        match = _TENSOR.fullmatch(tensor)
        if match is None or len(shape) != 2:
            raise ValueError(f"{ADAPTER_WEIGHTS} has {tensor}, which is no matrix of an adapter")
        is_a = match["matrix"] == "A"  # A is [rank, in], B is [out, rank]
        size, rank = (shape[1], shape[0]) if is_a else shape
        if policy is not None and size != expected.get(tensor, (0, 0))[is_a]:
            raise ValueError(f"{tensor} of shape {shape} does not fit the model")
        second = shapes.get(f"{match['layer']}.lora_{'B' if is_a else 'A'}.weight", ())
        if len(second) != 2 or second[is_a] != rank:
            raise ValueError(f"{tensor} of shape {shape} has no second matrix that fits")
        ranks.add(rank)
        targets.add(match["target"])
    return ranks, targets
