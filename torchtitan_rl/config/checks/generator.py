"""What replicas are checked against, in a training run and where they only serve."""

from __future__ import annotations

import math

from torchtitan_rl.config.hf_model import PolicyFacts
from torchtitan_rl.generation.config import GeneratorConfig

_STEP_TOKENS = 4096  # an engine's step takes so many, or max_model_len, if that is more
_BLOCK_TOKENS = 32  # of the CPU's KV cache


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


def head_errors(name: str, degree: int, policy: PolicyFacts) -> list[str]:
    """Whether the policy's heads can be split over ``degree`` ranks."""
    if degree <= 0 or not (policy.num_heads % degree or policy.num_kv_heads % degree):
        return []
    return [
        f"{name} is {degree}: give a divisor of the policy's {policy.num_heads} heads and "
        f"{policy.num_kv_heads} key/value heads"
    ]
