"""From a configuration to something that can start: the policy found, the processes planned,
every mistake reported. Starts nothing."""

from __future__ import annotations

import os
import pprint
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchtitan_rl.config import RunConfig
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.orchestration.capacity import Capacity, derive_capacity
from torchtitan_rl.plan import ProcessPlan, plan_processes
from torchtitan_rl.policies import resolve_checkpoint
from torchtitan_rl.serving.address import Keys
from torchtitan_rl.validation import MachineFacts, find_mistakes, read_policy_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    config: RunConfig
    policy_dir: Path
    plan: ProcessPlan
    capacity: Capacity
    keys: Keys

    def describe(self) -> str:
        """What ``--dry-run`` prints."""
        return "\n".join(
            [
                pprint.pformat(self.config, width=100, sort_dicts=False),
                f"policy: {self.policy_dir}",
                f"outputs: {self.config.run_dir}",
                self.plan.describe(),
                self.capacity.describe(),
            ]
        )


def prepare_run(config: RunConfig) -> PreparedRun:
    """Raises `ConfigError` with all mistakes."""
    policy_dir = resolve_checkpoint(config.policy.checkpoint)
    try:
        policy = read_policy_facts(policy_dir)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"policy.checkpoint is {config.policy.checkpoint}: no usable Hugging Face checkpoint "
            f"({error}); give a directory with config.json, tokenizer.json and *.safetensors"
        ) from error
    cores = sorted(os.sched_getaffinity(0))
    machine = machine_facts()
    keys = Keys.of()
    mistakes = find_mistakes(config, policy, machine, keys)
    if mistakes:
        raise ConfigError(mistakes)
    return PreparedRun(
        config=config,
        policy_dir=policy_dir,
        plan=plan_processes(config, num_cuda_devices=machine.num_cuda_devices, cores=cores),
        capacity=derive_capacity(
            groups_per_step=config.rollout.groups_per_step,
            staleness=config.schedule.staleness,
            window=config.schedule.window,
        ),
        keys=keys,
    )


def machine_facts() -> MachineFacts:
    """Of the machine that this process runs on, as far as it may use it."""
    import torch

    return MachineFacts(
        num_cuda_devices=torch.cuda.device_count(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
    )
