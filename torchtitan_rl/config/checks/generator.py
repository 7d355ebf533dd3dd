"""What replicas are checked against, in a training run and where they only serve."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.generation.config import GeneratorConfig

ENGINE_OVERHEAD_BYTES = 1 << 30  # a process with vLLM or torchtitan imported
_STEP_TOKENS = 4096  # an engine's step takes so many, or max_model_len, if that is more
_BLOCK_TOKENS = 32  # of the CPU's KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """What the configuration is checked against, read from a checkpoint's ``config.json``."""

    num_heads: int
    num_kv_heads: int
    max_positions: int
    vocab_size: int
    num_bytes: int  # of the weight files
    bytes_per_weight: int = 2  # in those files
    kv_values_per_token: int = 0  # keys and values of all layers; 0: not known

    @property
    def num_weights(self) -> int:
        return self.num_bytes // self.bytes_per_weight

    def num_bytes_as(self, dtype: Literal["float32", "bfloat16"]) -> int:
        return self.num_weights * {"float32": 4, "bfloat16": 2}[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What the machine has. ``cuda_devices`` are named as in ``CUDA_VISIBLE_DEVICES``."""

    cuda_devices: tuple[str, ...] = ()
    num_cores: int
    memory_bytes: int
    max_open_files: int | None = None  # of one process; None: any number


def read_policy_facts(directory: Path) -> PolicyFacts:
    """Raises OSError or ValueError where the directory is no Hugging Face checkpoint."""
    hf_config = json.loads((directory / "config.json").read_text())
    if not isinstance(hf_config, dict):
        raise ValueError(f"{directory / 'config.json'} is no JSON object")
    weights = list(directory.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{directory} has no *.safetensors file")
    if not (directory / "tokenizer.json").exists():
        raise ValueError(f"{directory} has no tokenizer.json")
    num_heads = _size(hf_config, "num_attention_heads")
    num_kv_heads = _size(hf_config, "num_key_value_heads", default=num_heads)
    of_heads = _size(hf_config, "hidden_size", default=0) // num_heads
    is_qwen3 = hf_config.get("model_type") == "qwen3"  # for which transformers assumes 128
    head_dim = _size(hf_config, "head_dim", default=128 if is_qwen3 else of_heads)
    num_layers = _size(hf_config, "num_hidden_layers", default=0)
    dtype = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return PolicyFacts(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_positions=_size(hf_config, "max_position_embeddings"),
        vocab_size=_size(hf_config, "vocab_size"),
        num_bytes=sum(path.stat().st_size for path in weights),
        bytes_per_weight=4 if dtype == "float32" else 2,
        kv_values_per_token=2 * num_layers * num_kv_heads * head_dim,
    )


def _size(hf_config: dict[str, Any], name: str, *, default: int | None = None) -> int:
    """A field of ``config.json``, which some files have as null."""
    value = hf_config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} in config.json is {value!r}, and no whole number above 0")
    return value


def generator_errors(
    generator: GeneratorConfig, policy: PolicyFacts, *, is_on_cpu: bool
) -> list[str]:
    """What must hold between its fields, and with the policy: one message per error. Devices and
    memory are not looked at."""
    errors = head_errors("generator.tensor_parallel", generator.tensor_parallel, policy)
    if generator.heartbeat_s * 2 > generator.collective_timeout_s:
        errors.append(
            f"generator.heartbeat_s is {generator.heartbeat_s}: give at most half of "
            f"generator.collective_timeout_s ({generator.collective_timeout_s}), or idle "
            "ranks time out"
        )
    if generator.max_model_len > policy.max_positions:
        errors.append(
            f"generator.max_model_len is {generator.max_model_len}: the policy has "
            f"{policy.max_positions} positions; give at most that"
        )
    elif is_on_cpu:
        errors += _cache_errors(generator, policy)
    step_tokens = max(_STEP_TOKENS, generator.max_model_len)
    if generator.max_running_requests > step_tokens:
        errors.append(
            f"generator.max_running_requests is {generator.max_running_requests}: a step of an "
            f"engine takes {step_tokens} tokens, one or more of each request; give at most that"
        )
    return errors


def _cache_errors(generator: GeneratorConfig, policy: PolicyFacts) -> list[str]:
    """Whether the KV cache of a rank holds one request of the full length."""
    blocks = math.ceil(generator.max_model_len / _BLOCK_TOKENS) + 1  # vLLM keeps one to itself
    values = blocks * _BLOCK_TOKENS * policy.kv_values_per_token
    needed = 4 * math.ceil(values / generator.tensor_parallel)  # float32
    if generator.kv_cache_bytes >= needed:
        return []
    return [
        f"generator.kv_cache_bytes is {generator.kv_cache_bytes}: one request of "
        f"generator.max_model_len ({generator.max_model_len}) tokens takes {needed}; give at least "
        "that, better many times as much"
    ]


def room_errors(
    generator: GeneratorConfig, policy: PolicyFacts, machine: MachineFacts
) -> list[str]:
    """Devices, or on the CPU memory, for replicas alone."""
    ranks = generator.replicas * generator.tensor_parallel
    if machine.cuda_devices:
        if ranks <= len(machine.cuda_devices):
            return []
        return [
            f"generator.replicas is {generator.replicas}: with generator.tensor_parallel "
            f"{generator.tensor_parallel} they need {ranks} CUDA devices, and "
            f"{len(machine.cuda_devices)} are visible; give fewer"
        ]
    weights = policy.num_bytes_as("float32")
    needed = ranks * (weights + generator.kv_cache_bytes + ENGINE_OVERHEAD_BYTES)
    if needed <= machine.memory_bytes:
        return []
    return [
        f"generator.replicas is {generator.replicas}: they need about {needed / 2**30:.0f} GiB and "
        f"the machine has {machine.memory_bytes / 2**30:.0f} GiB; give fewer replicas or a smaller "
        "generator.kv_cache_bytes"
    ]


def head_errors(name: str, degree: int, policy: PolicyFacts) -> list[str]:
    """Whether the policy's heads can be split over ``degree`` ranks."""
    if degree <= 0 or not (policy.num_heads % degree or policy.num_kv_heads % degree):
        return []
    return [
        f"{name} is {degree}: give a divisor of the policy's {policy.num_heads} heads and "
        f"{policy.num_kv_heads} key/value heads"
    ]
