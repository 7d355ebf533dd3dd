"""What replicas are checked against, in a training run and where they only serve."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.config import GeneratorConfig

ENGINE_OVERHEAD_BYTES = 1 << 30  # a process with vLLM or torchtitan imported


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """What the configuration is checked against, read from a checkpoint's ``config.json``."""

    num_heads: int
    num_kv_heads: int
    max_positions: int
    vocab_size: int
    num_bytes: int  # of the weight files


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What the machine has."""

    num_cuda_devices: int
    num_cores: int
    memory_bytes: int


def read_policy_facts(directory: Path) -> PolicyFacts:
    """Raises OSError or ValueError where the directory is no Hugging Face checkpoint."""
    hf_config = json.loads((directory / "config.json").read_text())
    weights = list(directory.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{directory} has no *.safetensors file")
    if not (directory / "tokenizer.json").exists():
        raise ValueError(f"{directory} has no tokenizer.json")
    num_heads = int(hf_config["num_attention_heads"])
    return PolicyFacts(
        num_heads=num_heads,
        num_kv_heads=int(hf_config.get("num_key_value_heads") or num_heads),
        max_positions=int(hf_config["max_position_embeddings"]),
        vocab_size=int(hf_config["vocab_size"]),
        num_bytes=sum(path.stat().st_size for path in weights),
    )


def generator_mistakes(generator: GeneratorConfig, policy: PolicyFacts) -> list[str]:
    """One message per mistake; devices and memory are not looked at."""
    mistakes = [
        *too_small(
            {
                "generator.replicas": (generator.replicas, 1),
                "generator.tensor_parallel": (generator.tensor_parallel, 1),
                "generator.max_model_len": (generator.max_model_len, 2),
                "generator.max_running_requests": (generator.max_running_requests, 1),
                "generator.max_steps_per_decision": (generator.max_steps_per_decision, 1),
                "generator.threads": (generator.threads, 1),
            }
        ),
        *not_positive(
            {
                "generator.heartbeat_s": generator.heartbeat_s,
                "generator.collective_timeout_s": generator.collective_timeout_s,
                "generator.request_timeout_s": generator.request_timeout_s,
                "generator.stall_timeout_s": generator.stall_timeout_s,
                "generator.start_timeout_s": generator.start_timeout_s,
            }
        ),
        *head_mistakes("generator.tensor_parallel", generator.tensor_parallel, policy),
    ]
    if generator.heartbeat_s * 2 > generator.collective_timeout_s:
        mistakes.append(
            f"generator.heartbeat_s is {generator.heartbeat_s}: give at most half of "
            f"generator.collective_timeout_s ({generator.collective_timeout_s}), or idle "
            "ranks time out"
        )
    if generator.max_model_len > policy.max_positions:
        mistakes.append(
            f"generator.max_model_len is {generator.max_model_len}: the policy has "
            f"{policy.max_positions} positions; give at most that"
        )
    return mistakes


def room_mistakes(
    generator: GeneratorConfig, policy: PolicyFacts, machine: MachineFacts
) -> list[str]:
    """Devices, or on the CPU memory, for replicas alone."""
    ranks = generator.replicas * generator.tensor_parallel
    if machine.num_cuda_devices:
        if ranks <= machine.num_cuda_devices:
            return []
        return [
            f"generator.replicas is {generator.replicas}: with generator.tensor_parallel "
            f"{generator.tensor_parallel} they need {ranks} CUDA devices, and "
            f"{machine.num_cuda_devices} are visible; give fewer"
        ]
    weights = 2 * policy.num_bytes  # bfloat16 files become float32
    needed = ranks * (weights + generator.kv_cache_bytes + ENGINE_OVERHEAD_BYTES)
    if needed <= machine.memory_bytes:
        return []
    return [
        f"generator.replicas is {generator.replicas}: they need about {needed / 2**30:.0f} GiB and "
        f"the machine has {machine.memory_bytes / 2**30:.0f} GiB; give fewer replicas or a smaller "
        "generator.kv_cache_bytes"
    ]


def head_mistakes(name: str, degree: int, policy: PolicyFacts) -> list[str]:
    """Whether the policy's heads can be split over ``degree`` ranks."""
    if degree <= 0 or not (policy.num_heads % degree or policy.num_kv_heads % degree):
        return []
    return [
        f"{name} is {degree}: give a divisor of the policy's {policy.num_heads} heads and "
        f"{policy.num_kv_heads} key/value heads"
    ]


def too_small(at_least: Mapping[str, tuple[float, float]]) -> list[str]:
    """By field, its value and the least that it may be."""
    return [
        f"{name} is {value}: give at least {least}"
        for name, (value, least) in at_least.items()
        if not value >= least
    ]


def not_positive(values: Mapping[str, float]) -> list[str]:
    return [
        f"{name} is {value}: give a finite number above 0"
        for name, value in values.items()
        if not (math.isfinite(value) and value > 0)
    ]
