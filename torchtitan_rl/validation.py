"""Everything that can be known to be wrong before a process starts: one message per mistake.

Each message names the field, its value and the fix. Nothing here raises for a mistake, so that a
user sees all of them at once.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.config import RunConfig
from torchtitan_rl.generation.decision import kv_policy_mistakes
from torchtitan_rl.generation.validation import MAX_TEMPERATURE, MIN_TEMPERATURE
from torchtitan_rl.orchestration.capacity import capacity_mistakes
from torchtitan_rl.plan import num_devices_needed, num_threads_needed
from torchtitan_rl.training.loss_mistakes import loss_mistakes

_ENGINE_OVERHEAD_BYTES = 1 << 30  # a process with vLLM or torchtitan imported


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


def find_mistakes(config: RunConfig, policy: PolicyFacts, machine: MachineFacts) -> list[str]:
    """Every mistake in ``config`` for this policy on this machine; empty where it can start."""
    return [
        *_amounts(config),
        *_sampling(config),
        *_lengths(config, policy),
        *_parallelism(config, policy, machine),
        *_schedule(config),
        *_placement(config),
        *_weight_sync(config),
        *_memory(config, policy, machine),
        *_paths(config),
        *config.task.mistakes(),
    ]


def _amounts(config: RunConfig) -> list[str]:
    at_least = {
        "num_steps": (config.num_steps, 0),
        "rollout.group_size": (config.rollout.group_size, 2),
        "rollout.max_turns": (config.rollout.max_turns, 1),
        "rollout.sampling.max_tokens_per_turn": (config.rollout.sampling.max_tokens_per_turn, 1),
        "generator.replicas": (config.generator.replicas, 1),
        "generator.tensor_parallel": (config.generator.tensor_parallel, 1),
        "generator.max_running_requests": (config.generator.max_running_requests, 1),
        "generator.max_steps_per_decision": (config.generator.max_steps_per_decision, 1),
        "generator.threads": (config.generator.threads, 1),
        "trainer.threads": (config.trainer.threads, 1),
        "trainer.data_parallel_replicate": (config.trainer.data_parallel_replicate, 1),
        "trainer.data_parallel_shard": (config.trainer.data_parallel_shard, 1),
        "trainer.tensor_parallel": (config.trainer.tensor_parallel, 1),
        "trainer.rows_per_microbatch": (config.trainer.rows_per_microbatch, 1),
        "schedule.max_resamples": (config.schedule.max_resamples, 0),
        "schedule.max_empty_batches": (config.schedule.max_empty_batches, 1),
        "validation.num_problems": (config.validation.num_problems, 0),
        "validation.samples_per_problem": (config.validation.samples_per_problem, 1),
        "validation.every": (config.validation.every, 0),
        "checkpoint.every": (config.checkpoint.every, 0),
        "checkpoint.keep": (config.checkpoint.keep, 1),
        "metrics.rollouts_per_step": (config.metrics.rollouts_per_step, 0),
    }
    mistakes = [
        f"{name} is {value}: give at least {least}"
        for name, (value, least) in at_least.items()
        if value < least
    ]
    positive = {
        "rollout.step_timeout_s": config.rollout.step_timeout_s,
        "rollout.rollout_timeout_s": config.rollout.rollout_timeout_s,
        "generator.heartbeat_s": config.generator.heartbeat_s,
        "generator.collective_timeout_s": config.generator.collective_timeout_s,
        "generator.request_timeout_s": config.generator.request_timeout_s,
        "generator.start_timeout_s": config.generator.start_timeout_s,
        "schedule.report_wait_s": config.schedule.report_wait_s,
        "schedule.max_wait_s": config.schedule.max_wait_s,
        "weight_sync.lag_timeout_s": config.weight_sync.lag_timeout_s,
        "weight_sync.timeout_s": config.weight_sync.timeout_s,
        "trainer.step_timeout_s": config.trainer.step_timeout_s,
        "trainer.optimizer.learning_rate": config.trainer.optimizer.learning_rate,
        "trainer.optimizer.max_grad_norm": config.trainer.optimizer.max_grad_norm,
        "trainer.loss.clip_low": config.trainer.loss.clip_low,
        "trainer.loss.clip_high": config.trainer.loss.clip_high,
        "trainer.loss.max_log_ratio": config.trainer.loss.max_log_ratio,
    }
    mistakes += [
        f"{name} is {value}: give a finite number above 0"
        for name, value in positive.items()
        if not (math.isfinite(value) and value > 0)
    ]
    if config.trainer.loss.clip_low >= 1.0:
        mistakes.append(
            f"trainer.loss.clip_low is {config.trainer.loss.clip_low}: give less than 1, for "
            "1 - clip_low bounds a ratio from below"
        )
    if config.generator.heartbeat_s * 2 > config.generator.collective_timeout_s:
        mistakes.append(
            f"generator.heartbeat_s is {config.generator.heartbeat_s}: give at most half of "
            f"generator.collective_timeout_s ({config.generator.collective_timeout_s}), or idle "
            "ranks time out"
        )
    return mistakes


def _sampling(config: RunConfig) -> list[str]:
    sampling, mistakes = config.rollout.sampling, []
    for name, value, neutral in (
        ("top_p", sampling.top_p, 1.0),
        ("top_k", sampling.top_k, 0),
        ("min_p", sampling.min_p, 0.0),
    ):
        if value != neutral:
            mistakes.append(
                f"rollout.sampling.{name} is {value}: give {neutral}; the loss would not know "
                "which tokens were cut off"
            )
    bounds = f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
    if not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        mistakes.append(
            f"rollout.sampling.temperature is {sampling.temperature}: give {bounds}; greedy "
            "siblings would be identical and train nothing"
        )
    temperature = config.validation.temperature
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
        mistakes.append(f"validation.temperature is {temperature}: give 0 (greedy) or {bounds}")
    return mistakes


def _lengths(config: RunConfig, policy: PolicyFacts) -> list[str]:
    mistakes = []
    total = config.rollout.max_total_tokens
    if config.generator.max_model_len > policy.max_positions:
        mistakes.append(
            f"generator.max_model_len is {config.generator.max_model_len}: the policy has "
            f"{policy.max_positions} positions; give at most that"
        )
    if total > config.generator.max_model_len:
        mistakes.append(
            f"rollout.max_total_tokens is {total}: give at most generator.max_model_len "
            f"({config.generator.max_model_len})"
        )
    if total > config.trainer.row_len:
        mistakes.append(
            f"trainer.row_len is {config.trainer.row_len}: give at least rollout.max_total_tokens "
            f"({total}), so that every episode fits into a row"
        )
    if config.rollout.sampling.max_tokens_per_turn >= total:
        mistakes.append(
            f"rollout.sampling.max_tokens_per_turn is "
            f"{config.rollout.sampling.max_tokens_per_turn}: give less than "
            f"rollout.max_total_tokens ({total}), which holds the prompt too"
        )
    if config.trainer.row_len % config.trainer.tensor_parallel:
        mistakes.append(
            f"trainer.row_len is {config.trainer.row_len}: give a multiple of "
            f"trainer.tensor_parallel ({config.trainer.tensor_parallel})"
        )
    return mistakes


def _parallelism(config: RunConfig, policy: PolicyFacts, machine: MachineFacts) -> list[str]:
    mistakes = []
    for name, degree in (
        ("generator.tensor_parallel", config.generator.tensor_parallel),
        ("trainer.tensor_parallel", config.trainer.tensor_parallel),
    ):
        if degree > 0 and (policy.num_heads % degree or policy.num_kv_heads % degree):
            mistakes.append(
                f"{name} is {degree}: give a divisor of the policy's {policy.num_heads} heads and "
                f"{policy.num_kv_heads} key/value heads"
            )
    threads = num_threads_needed(config)
    if config.pin_cores and not machine.num_cuda_devices and threads > machine.num_cores:
        mistakes.append(
            f"pin_cores is True: replicas and trainer compute in {threads} threads, and there are "
            f"{machine.num_cores} cores; give fewer threads or replicas, or --no-pin-cores"
        )
    needed = num_devices_needed(config)
    if 0 < machine.num_cuda_devices < needed:
        mistakes.append(
            f"generator.replicas is {config.generator.replicas}: with "
            f"generator.tensor_parallel {config.generator.tensor_parallel} and "
            f"{config.trainer.world_size} trainer ranks the run needs {needed} CUDA devices, and "
            f"{machine.num_cuda_devices} are visible; give fewer"
        )
    return mistakes


def _schedule(config: RunConfig) -> list[str]:
    schedule = config.schedule
    mistakes = capacity_mistakes(
        groups_per_step=config.rollout.groups_per_step,
        staleness=schedule.staleness,
        window=schedule.window,
    )
    mistakes += loss_mistakes(config.trainer.loss, staleness=schedule.staleness)
    is_reserved = config.validation.placement == "reserved" and config.validation.num_problems > 0
    if is_reserved and config.generator.replicas < 2:
        mistakes.append(
            "validation.placement is reserved: give at least 2 generator.replicas, or shared"
        )
    if schedule.max_wait_s <= schedule.report_wait_s:
        mistakes.append(
            f"schedule.max_wait_s is {schedule.max_wait_s}: give more than schedule.report_wait_s "
            f"({schedule.report_wait_s}), so that a wait is reported before it ends the run"
        )
    return mistakes


def _placement(config: RunConfig) -> list[str]:
    if config.placement == "separate":
        return []
    mistakes = []
    if config.validation.placement == "reserved" and config.validation.num_problems > 0:
        mistakes.append(
            "validation.placement is reserved: with placement colocated nothing is generated "
            "beside training; give shared"
        )
    if config.weight_sync.transport == "rdma":
        mistakes.append(
            "weight_sync.transport is rdma: with placement colocated trainer and replicas are on "
            "one machine; give shared_memory or auto"
        )
    return mistakes


def _weight_sync(config: RunConfig) -> list[str]:
    sync = config.weight_sync
    return kv_policy_mistakes(
        resets=sync.reset_prefix_cache_on_pull,
        recomputes=sync.recompute_running_on_pull,
        drains=sync.mode == "drain",
    )


def _memory(config: RunConfig, policy: PolicyFacts, machine: MachineFacts) -> list[str]:
    """CPU runs only: float32 weights in every engine, four copies in the trainer, one more for a
    reference policy, two published."""
    if machine.num_cuda_devices:
        return []
    weights = 2 * policy.num_bytes  # bfloat16 files become float32
    engines = config.generator.replicas * config.generator.tensor_parallel
    copies = 5 if config.trainer.loss.kl_coefficient > 0 else 4
    needed = (
        engines * (weights + config.generator.kv_cache_bytes + _ENGINE_OVERHEAD_BYTES)
        + copies * weights * config.trainer.data_parallel_replicate
        + config.trainer.world_size * _ENGINE_OVERHEAD_BYTES
        + 2 * weights
    )
    if needed <= machine.memory_bytes:
        return []
    return [
        f"generator.replicas is {config.generator.replicas}: the run needs about "
        f"{needed / 2**30:.0f} GiB and the machine has {machine.memory_bytes / 2**30:.0f} GiB; "
        "give fewer replicas or a smaller generator.kv_cache_bytes"
    ]


def _paths(config: RunConfig) -> list[str]:
    run_dir = config.run_dir
    if (run_dir / "metrics.jsonl").exists() and not config.checkpoint.resume:
        return [
            f"name is {config.name}: {run_dir} holds a run already; give another name, or "
            "--checkpoint.resume to go on with it"
        ]
    parent = run_dir
    while not parent.exists():
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        return [f"output_dir is {config.output_dir}: {parent} cannot be written to; give another"]
    return []
