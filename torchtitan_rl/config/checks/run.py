"""All checks of a run's configuration: one message per error, before a process starts.

Each message names the field, its value and the fix. Nothing here raises for an error, so that a
user sees all of them at once: first the errors of single fields, then the
contradictions between fields. A contradiction with a field that has an error is not reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_rl.agents.task import AgentTask, agent_errors
from torchtitan_rl.config.checks.endpoint import endpoint_errors
from torchtitan_rl.config.checks.fields import but_about, field_errors, with_defaults_for
from torchtitan_rl.config.checks.generator import generator_errors, head_errors
from torchtitan_rl.config.checks.launch import host_errors, launch_errors
from torchtitan_rl.config.checks.loss import advantage_errors, loss_errors
from torchtitan_rl.config.checks.machine import (
    MachineFacts,
    file_errors,
    max_rollouts,
    memory_errors,
    parallelism_errors,
)
from torchtitan_rl.config.checks.paths import path_errors
from torchtitan_rl.config.checks.timeouts import timeout_errors
from torchtitan_rl.config.hf_model import PolicyFacts
from torchtitan_rl.config.hosts import HostFacts, device_of
from torchtitan_rl.config.launch import has_hosts
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.generation.decision import kv_policy_errors
from torchtitan_rl.generation.validation import MAX_TEMPERATURE, MIN_TEMPERATURE
from torchtitan_rl.orchestration.capacity import capacity_errors
from torchtitan_rl.serving.config import Keys


def find_errors(
    config: RunConfig,
    policy: PolicyFacts | None,
    machine: MachineFacts,
    keys: Keys | None = None,
) -> list[str]:
    """Every error in ``config`` for this policy on this machine; empty where it can start.

    Without a policy, what depends on it is not looked at. Its problems are not looked at either:
    see `checks/problems.py`. Neither are the hosts of a run on several: see `errors_on_hosts`.
    """
    wrong = field_errors(config)
    errors = list(wrong.values())
    if {"policy", "task"} & wrong.keys():  # without these there is nothing to look at
        return errors
    sound = with_defaults_for(config, wrong)
    errors += but_about(wrong, _relations(sound, policy, machine, keys or Keys.of()))
    if "name" not in wrong and "output_dir" not in wrong:
        errors += path_errors(sound)
    if not any(name == "task" or name.startswith("task.") for name in wrong):
        errors += config.task.errors()
    return errors


def errors_on_hosts(
    config: RunConfig, policy: PolicyFacts | None, hosts: Sequence[HostFacts]
) -> list[str]:
    """Whether the run fits on its hosts, if it has several; `find_errors` finds the rest."""
    is_on_cpu = device_of(hosts) == "cpu"
    errors = (
        [] if policy is None else generator_errors(config.generator, policy, is_on_cpu=is_on_cpu)
    )
    return errors + host_errors(config, policy, hosts)


def _relations(
    config: RunConfig, policy: PolicyFacts | None, machine: MachineFacts, keys: Keys
) -> list[str]:
    """Contradictions between fields that are right on their own."""
    schedule, on_hosts = _schedule(config), has_hosts(config.launch)
    errors = [*_sampling(config), *_lengths(config), *timeout_errors(config), *schedule]
    if policy is not None:
        if not on_hosts:
            is_on_cpu = not machine.cuda_devices
            errors += generator_errors(config.generator, policy, is_on_cpu=is_on_cpu)
            errors += memory_errors(config, policy, machine)
        errors += head_errors("trainer.tensor_parallel", config.trainer.tensor_parallel, policy)
    errors += [
        *launch_errors(config),
        *loss_errors(
            config.trainer.loss,
            staleness=config.schedule.staleness,
            updates=config.trainer.updates_per_batch,
        ),
        *_updates(config),
        *advantage_errors(config.rollout),
        *([] if on_hosts else parallelism_errors(config, machine)),
        *_placement(config),
        *_weight_sync(config),
    ]
    if config.endpoint.enabled:
        errors += endpoint_errors(config.endpoint, keys)
    if isinstance(config.task, AgentTask) and not schedule:
        errors += agent_errors(config.task, config.endpoint, num_rollouts=max_rollouts(config))
        errors += file_errors(config, machine)
    return errors


def _sampling(config: RunConfig) -> list[str]:
    temperature = config.evaluation.temperature
    if temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        return []
    return [
        f"evaluation.temperature is {temperature}: give 0 (greedy) or {MIN_TEMPERATURE} to "
        f"{MAX_TEMPERATURE}"
    ]


def _lengths(config: RunConfig) -> list[str]:
    errors = []
    total = config.rollout.max_total_tokens
    if total > config.generator.max_model_len:
        errors.append(
            f"rollout.max_total_tokens is {total}: give at most generator.max_model_len "
            f"({config.generator.max_model_len})"
        )
    if total > config.trainer.row_len:
        errors.append(
            f"trainer.row_len is {config.trainer.row_len}: give at least rollout.max_total_tokens "
            f"({total}), so that every episode fits into a row"
        )
    if config.rollout.sampling.max_tokens_per_turn >= total:
        errors.append(
            f"rollout.sampling.max_tokens_per_turn is "
            f"{config.rollout.sampling.max_tokens_per_turn}: give less than "
            f"rollout.max_total_tokens ({total}), which holds the prompt too"
        )
    if config.rollout.overlong.buffer_tokens > config.rollout.sampling.max_tokens_per_turn:
        errors.append(
            f"rollout.overlong.buffer_tokens is {config.rollout.overlong.buffer_tokens}: give at "
            "most rollout.sampling.max_tokens_per_turn "
            f"({config.rollout.sampling.max_tokens_per_turn})"
        )
    if config.trainer.row_len % config.trainer.tensor_parallel:
        errors.append(
            f"trainer.row_len is {config.trainer.row_len}: give a multiple of "
            f"trainer.tensor_parallel ({config.trainer.tensor_parallel})"
        )
    return errors


def _updates(config: RunConfig) -> list[str]:
    updates, groups = config.trainer.updates_per_batch, config.rollout.groups_per_step
    if updates <= groups:
        return []
    return [
        f"trainer.updates_per_batch is {updates}: give at most rollout.groups_per_step ({groups}), "
        "for a minibatch has whole groups"
    ]


def _schedule(config: RunConfig) -> list[str]:
    errors = capacity_errors(
        groups_per_step=config.rollout.groups_per_step,
        staleness=config.schedule.staleness,
        window=config.schedule.window,
    )
    if config.evaluation.reserves_replica and config.generator.replicas < 2:
        errors.append(
            "evaluation.placement is reserved: give at least 2 generator.replicas, or shared"
        )
    return errors


def _placement(config: RunConfig) -> list[str]:
    if config.placement == "separate":
        return []
    errors = []
    if config.evaluation.reserves_replica:
        errors.append(
            "evaluation.placement is reserved: with placement colocated nothing is generated "
            "alongside training; give shared"
        )
    if config.weight_sync.transport == "rdma" and not has_hosts(config.launch):
        errors.append(
            "weight_sync.transport is rdma: with placement colocated trainer and replicas are on "
            "one machine; give shared_memory or auto"
        )
    return errors


def _weight_sync(config: RunConfig) -> list[str]:
    sync = config.weight_sync
    return kv_policy_errors(
        resets=sync.reset_prefix_cache_on_pull,
        recomputes=sync.recompute_running_on_pull,
        drains=sync.mode == "drain",
    )
