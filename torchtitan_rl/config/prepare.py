"""From a configuration to something that can start: the policy found, the processes planned,
every error reported. Starts nothing.

What a run's folder says about the run, read before it is resumed.

``identity.json`` is the identity that the run was last started with, so that a run that was killed
before its first checkpoint, and continues from its journal, can be compared too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.agents.task import agent_notes
from torchtitan_rl.config.checks.fields import but_about, field_errors, with_defaults_for
from torchtitan_rl.config.checks.launch import host_notes
from torchtitan_rl.config.checks.machine import (
    MachineFacts,
    find_weight_room,
    machine_facts,
    max_rollouts,
    memory_use,
    num_published_versions,
)
from torchtitan_rl.config.checks.paths import IDENTITY_FILE, path_errors
from torchtitan_rl.config.checks.problems import find_problems
from torchtitan_rl.config.checks.resume import (
    resume_changes,
    resume_errors,
    run_identity,
    step_errors,
)
from torchtitan_rl.config.checks.run import errors_on_hosts, find_errors
from torchtitan_rl.config.checks.timeouts import start_notes
from torchtitan_rl.config.hf_model import PolicyFacts
from torchtitan_rl.config.host_plan import plan_on_hosts
from torchtitan_rl.config.hosts import HostFacts, count, made_up_hosts
from torchtitan_rl.config.launch import has_hosts
from torchtitan_rl.config.manifest import MANIFEST, remove_manifest
from torchtitan_rl.config.plan import ProcessPlan, plan_processes
from torchtitan_rl.config.policies import find_policy, is_elsewhere
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import CheckpointError, ConfigError
from torchtitan_rl.files import replace_file
from torchtitan_rl.launch.lease import Lease, hold_run, lock_errors, unwritable
from torchtitan_rl.orchestration.saved_run import read_position
from torchtitan_rl.serving.config import Keys
from torchtitan_rl.training.checkpoint_files import MARKER
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """``notes`` are lines that the user should see when the run starts. ``identity`` is what a
    resumed run will be compared with. A complete run has nothing left to do."""

    config: RunConfig
    policy_dir: Path
    plan: ProcessPlan
    keys: Keys
    evaluation_problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    num_weights: int | None = None  # of the policy, where it is on this machine
    memory_bytes: dict[str, int] = field(default_factory=dict)  # by part, on CPUs
    identity: dict[str, Any] = field(default_factory=dict)
    resume_point: ResumePoint | None = None

    @property
    def is_complete(self) -> bool:
        return self.resume_point is not None and is_complete(self.resume_point, self.config)

    def describe(self) -> str:
        """What ``--dry-run`` prints."""
        config, rollout = self.config, self.config.rollout
        size = "" if self.num_weights is None else f", {self.num_weights / 1e6:,.1f} M parameters"
        lines = [
            f"task: {type(config.task).__name__}",
            f"policy: {self.policy_dir}{size}",
            f"outputs: {config.run_dir}",
            self.plan.describe(),
            self._describe_memory(),
            f"steps: {config.num_steps} of {rollout.groups_per_step} groups of "
            f"{rollout.group_size} rollouts, each of at most {count(rollout.max_turns, 'turn')} "
            f"and {rollout.max_total_tokens} tokens; learning rate "
            f"{config.trainer.optimizer.learning_rate:g}",
            config.capacity.describe(),
            f"rollouts: at most {max_rollouts(config)} at once, "
            f"{config.request_timeout_s:g} s for a request, "
            f"{rollout.rollout_timeout_s:g} s for a rollout",
            f"training: {self._describe_training()}",
            f"weights: at most {num_published_versions(config)} versions published at a time",
            f"evaluation: {self._describe_evaluation()}",
            f"start: {self._describe_start()}",
            *self.notes,
        ]
        return "\n".join(line for line in lines if line)

    def document(self) -> dict[str, Any]:
        """What ``--dry-run --json`` prints: all of the configuration, and the plan."""
        return {
            "configuration": self.config,
            "policy": self.policy_dir,
            "num_weights": self.num_weights,
            "outputs": self.config.run_dir,
            "processes": self.plan,
            "memory_bytes": self.memory_bytes,
            "capacity": self.config.capacity,
            "max_rollouts": max_rollouts(self.config),
            "published_versions": num_published_versions(self.config),
            "first_step": 1 + (self.resume_point.step if self.resume_point else 0),
            "notes": self.notes,
        }

    def _describe_memory(self) -> str:
        if self.plan.device == "cuda":
            share = self.config.generator.gpu_memory_utilization
            return f"memory: each replica takes {share:.0%} of its devices'"
        sizes = self.memory_bytes.items()
        parts = [f"{name} {size / 2**30:.1f}" for name, size in sizes if size >= 2**27]
        total = sum(self.memory_bytes.values()) / 2**30
        return f"memory: about {total:.1f} GiB ({', '.join(parts)})" if parts else ""

    def _describe_training(self) -> str:
        trainer = self.config.trainer
        tokens = trainer.row_len * trainer.rows_per_microbatch
        shared = "once" if trainer.share_prefixes else "in each (trainer.share_prefixes is off)"
        return (
            f"at most {tokens:,} tokens in a forward pass of a rank; tokens that several episodes "
            f"begin with are computed {shared}"
        )

    def _describe_evaluation(self) -> str:
        evaluation = self.config.evaluation
        if not evaluation.num_problems:
            return "none"
        every = f", every {evaluation.every} steps" if evaluation.every else ""
        problems = count(evaluation.num_problems, "problem")
        rollouts = count(evaluation.samples_per_problem, "rollout")
        return f"{problems}, {rollouts} each, before the first step{every} and after the last"

    def _describe_start(self) -> str:
        if self.resume_point is not None:
            return f"resumes what {self.config.run_dir} holds, after step {self.resume_point.step}"
        resume = self.config.checkpoint.resume
        return "step 1" + (f"; {self.config.run_dir} holds nothing to resume" if resume else "")


AskHosts = Callable[[Path], tuple[HostFacts, ...]]
"""Attaches to the hosts of a run, with the policy's directory here: what the hosts have. Raises
`ConfigError` where one cannot be used."""


def prepare_run(
    config: RunConfig, machine: MachineFacts | None = None, *, ask_hosts: AskHosts | None = None
) -> PreparedRun:
    """Find, check and plan. ``machine`` replaces the one that this runs on.

    With ``launch.hosts``, the policy may be missing here, as the hosts are: a note says so.
    With ``launch.attach``, ``ask_hosts`` is called once everything else is right; the plan is made
    for what the hosts answer.

    Raises:
        ConfigError: with all errors; the task's problems are read where its fields are right.
    """
    machine = machine or machine_facts()
    keys = Keys.of()
    wrong = field_errors(config)
    if {"policy", "task"} & wrong.keys():
        raise ConfigError(find_errors(config, None, machine, keys))
    policy_dir: Path | None = None
    policy: PolicyFacts | None = None
    errors: list[str] = []
    if "policy.checkpoint" not in wrong:
        try:
            policy_dir, policy = find_policy(config.policy.checkpoint, is_trained=True)
        except ConfigError as error:
            if config.launch.hosts and is_elsewhere(config.policy.checkpoint):
                policy_dir = Path(config.policy.checkpoint)
            else:
                errors = error.errors
    errors += find_errors(config, policy, machine, keys)
    sound = with_defaults_for(config, wrong)
    problems: tuple[Problem, ...] = ()
    if not wrong and not config.task.errors():
        problems, found = find_problems(config)
        errors += found
    notes = agent_notes(sound.task, sound.endpoint)
    if policy is not None and not has_hosts(sound.launch):
        room = find_weight_room(sound, policy, machine)
        errors += but_about(wrong, [room.error] if room.error else [])
        notes += [room.note] if room.note else []
    identity: dict[str, Any] = {}
    resume_point: ResumePoint | None = None
    if policy is not None and policy_dir is not None and not {"name", "output_dir"} & wrong.keys():
        identity = run_identity(sound, policy_dir)
        resume_point, found, changes = _compare(sound, identity)
        errors += but_about(wrong, found)
        notes += changes
    if errors or policy_dir is None:
        raise ConfigError(errors)
    plan = _plan(config, policy_dir, policy, machine, ask_hosts)
    notes += host_notes(config, plan)
    notes += start_notes(
        config.task,
        step_timeout_s=config.rollout.step_timeout_s,
        num_rollouts=max_rollouts(config),
        num_cores=machine.num_cores,
    )
    if policy is None:
        notes.append(
            f"policy.checkpoint is {config.policy.checkpoint!r}: it is not on this machine, so "
            "whether the run fits it was not checked"
        )
    return PreparedRun(
        config=config,
        policy_dir=policy_dir,
        plan=plan,
        keys=keys,
        evaluation_problems=problems,
        notes=tuple(notes),
        num_weights=None if policy is None else policy.num_weights,
        memory_bytes=memory_use(config, policy) if policy and plan.device == "cpu" else {},
        identity=identity,
        resume_point=resume_point,
    )


@contextmanager
def claim_run(prepared: PreparedRun) -> Iterator[Lease]:
    """Hold the run's folder, made if need be, and write down what the run is.

    Raises:
        ConfigError: another process holds it, or has had it since `prepare_run`, or it cannot be
            written to.
    """
    run_dir = prepared.config.run_dir
    with hold_run(run_dir) as lease:
        if errors := path_errors(prepared.config):
            raise ConfigError(errors)
        try:
            remove_manifest(run_dir)
            write_identity(run_dir, prepared.identity)
            prepared.config.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(run_dir, error) from error
        yield lease


def _plan(
    config: RunConfig,
    policy_dir: Path,
    policy: PolicyFacts | None,
    machine: MachineFacts,
    ask_hosts: AskHosts | None,
) -> ProcessPlan:
    launch = config.launch
    if not has_hosts(launch):
        cores = sorted(os.sched_getaffinity(0))[: machine.num_cores]
        return plan_processes(config, devices=machine.cuda_devices, cores=cores)
    if launch.hosts:
        hosts = made_up_hosts(launch.hosts, launch.attach)
    elif ask_hosts is not None:
        hosts = ask_hosts(policy_dir)
    else:
        raise ConfigError("launch.attach: only torchtitan-rl train uses other hosts; leave it out")
    if errors := errors_on_hosts(config, policy, hosts):
        raise ConfigError(errors)
    return plan_on_hosts(config, hosts)


def _compare(
    config: RunConfig, identity: dict[str, Any]
) -> tuple[ResumePoint | None, list[str], list[str]]:
    """What the run's folder holds to be resumed, and errors and notes of a comparison with it."""
    run_dir = config.run_dir
    if held := lock_errors(run_dir):
        return None, held, []
    saved = find_resume_point(run_dir) if config.checkpoint.resume else None
    if saved is None:
        return None, [], []
    before, notes = saved.identity or {}, []
    if not before:
        notes.append(f"{run_dir} does not say what the run was: its configuration is not compared")
    if changes := resume_changes(before, identity):
        notes.append(f"changed since the checkpoint: {', '.join(changes)}")
    if is_complete(saved, config):
        notes.append(
            f"{run_dir} is complete: all {saved.step} steps are done; give more by --num-steps"
        )
    return saved, [*resume_errors(before, identity), *step_errors(saved.step, config)], notes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """``checkpoint`` is the newest complete one; ``identity`` is None where none was saved."""

    checkpoint: Path | None
    step: int
    version: int = 0
    evaluated_step: int | None
    identity: dict[str, Any] | None


def find_resume_point(run_dir: Path) -> ResumePoint | None:
    """None where there is nothing to resume. Changes nothing."""
    directory = CheckpointDirectory(run_dir / "checkpoints")
    launched = _read_identity(run_dir / IDENTITY_FILE)
    for step in reversed(directory.steps()):
        try:
            position = read_position(directory.path(step))
        except CheckpointError:  # it was removed or damaged just now
            continue
        return ResumePoint(
            checkpoint=directory.path(step),
            step=step,
            version=position.version,
            evaluated_step=position.evaluated_step,
            identity=dict(position.identity) or launched,
        )
    if launched is None:
        return None
    return ResumePoint(checkpoint=None, step=0, evaluated_step=None, identity=launched)


def write_identity(run_dir: Path, identity: dict[str, Any]) -> None:
    """All or nothing.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(run_dir / IDENTITY_FILE, json.dumps(identity, indent=2).encode() + b"\n")


def is_complete(saved: ResumePoint, config: RunConfig) -> bool:
    """Whether nothing is left to do: all steps, the last evaluation, the export, and the list of
    all files. A run in which no step trained is never complete."""
    if saved.checkpoint is None or saved.step < config.num_steps or saved.version == 0:
        return False
    if not (config.run_dir / MANIFEST).is_file():
        return False
    if not config.checkpoint.export_hf:
        return config.evaluation.num_problems == 0 or saved.evaluated_step == saved.step
    exported = config.run_dir / "policy" / "config.json"  # written after the last checkpoint
    return exported.is_file() and (
        exported.stat().st_mtime >= (saved.checkpoint / MARKER).stat().st_mtime
    )


def _read_identity(path: Path) -> dict[str, Any] | None:
    try:
        identity = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return identity if isinstance(identity, dict) else None
