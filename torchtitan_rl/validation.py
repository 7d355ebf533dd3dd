"""Everything that can be known to be wrong before a process starts: one message per mistake.

Each message names the field, its value and the fix. Nothing here raises for a mistake, so that a
user sees all of them at once.
"""

from __future__ import annotations

import os

from torchtitan_rl.config import RunConfig
from torchtitan_rl.generation.decision import kv_policy_mistakes
from torchtitan_rl.generation.validation import MAX_TEMPERATURE, MIN_TEMPERATURE
from torchtitan_rl.orchestration.capacity import capacity_mistakes
from torchtitan_rl.plan import needs_endpoint, num_devices_needed, num_threads_needed
from torchtitan_rl.rollout.agent_task import agent_mistakes
from torchtitan_rl.serving.address import Keys, endpoint_mistakes
from torchtitan_rl.training.loss_mistakes import loss_mistakes
from torchtitan_rl.validation_generator import (
    ENGINE_OVERHEAD_BYTES,
    MachineFacts,
    PolicyFacts,
    generator_mistakes,
    head_mistakes,
    not_positive,
    read_policy_facts,
    too_small,
)

__all__ = ["MachineFacts", "PolicyFacts", "find_mistakes", "read_policy_facts"]


def find_mistakes(
    config: RunConfig, policy: PolicyFacts, machine: MachineFacts, keys: Keys | None = None
) -> list[str]:
    """Every mistake in ``config`` for this policy on this machine; empty where it can start."""
    return [
        *_amounts(config),
        *generator_mistakes(config.generator, policy),
        *_sampling(config),
        *_lengths(config, policy),
        *_parallelism(config, policy, machine),
        *_schedule(config),
        *_placement(config),
        *_weight_sync(config),
        *_memory(config, policy, machine),
        *_paths(config),
        *(endpoint_mistakes(config.endpoint, keys or Keys.of()) if needs_endpoint(config) else []),
        *agent_mistakes(config.task, config.endpoint, num_rollouts=_num_rollouts(config)),
        *config.task.mistakes(),
    ]


def _num_rollouts(config: RunConfig) -> int:
    """At most so many run at once, those of a validation included."""
    groups = (config.schedule.staleness + 1) * config.rollout.groups_per_step
    validation = config.validation.num_problems * config.validation.samples_per_problem
    return groups * config.rollout.group_size + validation


def _amounts(config: RunConfig) -> list[str]:
    at_least = {
        "num_steps": (config.num_steps, 0),
        "rollout.group_size": (config.rollout.group_size, 2),
        "rollout.max_turns": (config.rollout.max_turns, 1),
        "rollout.sampling.max_tokens_per_turn": (config.rollout.sampling.max_tokens_per_turn, 1),
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
        "checkpoint.max_failures": (config.checkpoint.max_failures, 1),
        "metrics.rollouts_per_step": (config.metrics.rollouts_per_step, 0),
    }
    positive = {
        "rollout.step_timeout_s": config.rollout.step_timeout_s,
        "rollout.rollout_timeout_s": config.rollout.rollout_timeout_s,
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
    mistakes = [*too_small(at_least), *not_positive(positive)]
    if config.trainer.loss.clip_low >= 1.0:
        mistakes.append(
            f"trainer.loss.clip_low is {config.trainer.loss.clip_low}: give less than 1, for "
            "1 - clip_low bounds a ratio from below"
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
    degree = config.trainer.tensor_parallel
    mistakes = head_mistakes("trainer.tensor_parallel", degree, policy)
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
        engines * (weights + config.generator.kv_cache_bytes + ENGINE_OVERHEAD_BYTES)
        + copies * weights * config.trainer.data_parallel_replicate
        + config.trainer.world_size * ENGINE_OVERHEAD_BYTES
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
