"""What replicas are checked against, in a training run and where they only serve."""

from __future__ import annotations

import math

from torchtitan_rl.config.hf_model import PolicyFacts
from torchtitan_rl.generation.config import GeneratorConfig

# The smallest block that vLLM's CPU attention supports; it reads whole blocks. Compared with vLLM's
# 128 tokens, the tiny policy decodes 15 % faster and 135M as fast, and prompts of more than 32
# tokens share prefixes.
CPU_BLOCK_TOKENS = 32
_STEP_TOKENS = 4096


def step_tokens(generator: GeneratorConfig) -> int:
    """Tokens that one step of an engine takes at most. Prompts are never cut into chunks."""
    return max(_STEP_TOKENS, generator.max_model_len)


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
    if generator.max_running_requests > (most := step_tokens(generator)):
        errors.append(
            f"generator.max_running_requests is {generator.max_running_requests}: a step of an "
            f"engine takes {most} tokens, one or more of each request; give at most that"
        )
    return errors


def _cache_errors(generator: GeneratorConfig, policy: PolicyFacts) -> list[str]:
    """Whether the KV cache of a rank holds one request of the full length."""
    blocks = math.ceil(generator.max_model_len / CPU_BLOCK_TOKENS) + 1  # vLLM keeps one to itself
    values = blocks * CPU_BLOCK_TOKENS * policy.kv_values_per_token
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
