"""Prepares a run: finds the policy, checks everything, plans the processes, and reports every
error. Starts no process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.agents.task import agent_notes
from torchtitan_rl.bounds import check_fields
from torchtitan_rl.config.checks import errors_on_hosts, find_errors, start_notes
from torchtitan_rl.config.fit import device_bytes
from torchtitan_rl.config.hosts import host_notes
from torchtitan_rl.config.machine import (
    HostFacts,
    count,
    hosts_by_mesh,
    machine_facts,
    made_up_hosts,
)
from torchtitan_rl.config.memory import MemoryPlan, memory_plan
from torchtitan_rl.config.model import PolicyFacts, find_policy, is_elsewhere
from torchtitan_rl.config.plan import ProcessPlan, plan_on_hosts, plan_processes
from torchtitan_rl.config.problems import find_problems, row_errors
from torchtitan_rl.config.published import published_facts
from torchtitan_rl.config.resume import (
    MANIFEST,
    ResumePoint,
    compare_with_saved,
    is_complete,
    run_identity,
    write_identity,
)
from torchtitan_rl.config.room import find_weight_room
from torchtitan_rl.config.run import RunConfig, has_hosts, path_errors
from torchtitan_rl.config.teachers import FoundTeacher, find_teachers, teacher_identity
from torchtitan_rl.environments.supervised import SupervisedTask
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.launch.lease import Lease, hold_run, unwritable
from torchtitan_rl.rollout.episodes import ADVANTAGE_KINDS
from torchtitan_rl.serving.config import Keys
from torchtitan_rl.training.config import decided_loss
from torchtitan_rl.types import Problem
from torchtitan_rl.weights.config import Transport, choose_transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A checked run that can start. ``notes`` are lines to show to the user at the start.
    ``identity`` is compared with that of a later resumed run. A complete run has nothing left to
    do."""

    config: RunConfig
    policy_dir: Path
    plan: ProcessPlan
    keys: Keys
    evaluation_problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    num_weights: int | None = None  # the policy's, if the policy is on this machine
    memory: MemoryPlan | None = None  # None: the sizes of the policy are not known
    identity: dict[str, Any] = field(default_factory=dict)
    resume_point: ResumePoint | None = None
    routed_bytes: int = 0  # of the experts of a token, see `RoutedExperts`; 0: not recorded
    teachers: Mapping[str, FoundTeacher] = field(default_factory=dict)  # by their source

    @property
    def is_complete(self) -> bool:
        return self.resume_point is not None and is_complete(self.resume_point, self.config)

    def describe(self) -> str:
        """What ``--dry-run`` prints."""
        config, rollout = self.config, self.config.rollout
        modes = {
            "both": "",
            "generate": "mode: generate; the policy does not change",
            "train": f"mode: train, on the rollouts of {config.rollouts}",
        }
        size = "" if self.num_weights is None else f", {self.num_weights / 1e6:,.1f} M parameters"
        point = self.resume_point
        start = f"start: {self.describe_start(point.step if point and point.checkpoint else None)}"
        first = [
            f"task: {type(config.task).__name__}",
            f"policy: {self.policy_dir}{size}",
            self._describe_teachers(),
            f"outputs: {config.run_dir}",
            self.plan.describe(),
            *([] if self.memory is None else self.memory.describe()),
        ]
        if isinstance(config.task, SupervisedTask):
            supervised = [*self._describe_supervised(config.task), start, *self.notes]
            return "\n".join([*first[1:], *supervised])
        lines = [
            *first,
            modes[config.mode],
            f"steps: {config.num_steps} of {rollout.groups_per_step} groups of "
            f"{rollout.group_size} rollouts, each of at most {count(rollout.max_turns, 'turn')} "
            f"and {rollout.max_total_tokens} tokens; learning rate "
            f"{config.trainer.optimizer.learning_rate:g}",
            config.capacity.describe(),
            f"rollouts: at most {config.max_rollouts} at once, "
            f"{config.request_timeout_s:g} s for a request, "
            f"{rollout.rollout_timeout_s:g} s for a rollout",
            "" if config.mode == "train" else describe_replica(config.generator, self.plan.device),
            "" if config.mode == "generate" else f"training: {self._describe_training()}",
            self._describe_mixing(),
            self._describe_weights(),
            f"evaluation: {self._describe_evaluation()}",
            self._describe_recording(),
            start,
            *self.notes,
        ]
        return "\n".join(line for line in lines if line)

    def _describe_supervised(self, task: SupervisedTask) -> list[str]:
        data, held_out, trainer = task.data, task.held_out, self.config.trainer
        what = "conversations" if task.beta is None else f"pairs, beta {task.beta:g},"
        every = f", every {held_out.every} steps" if held_out.every else ""
        rows = f"the first {held_out.num_rows} rows" if held_out.num_rows else "all rows"
        evaluation = f"{rows} of {', '.join(held_out.files)}, before the first step{every} and "
        return [
            f"steps: {self.config.num_steps} of {data.per_step} {what} of at most "
            f"{trainer.max_episode_tokens} tokens, from {', '.join(data.train)}; learning rate "
            f"{trainer.optimizer.learning_rate:g}",
            f"training: {self._describe_training()}",
            f"evaluation: {f'{evaluation}after the last' if held_out.files else 'none'}",
        ]

    def document(self) -> dict[str, Any]:
        """What ``--dry-run --json`` prints: all of the configuration, and the plan."""
        config, generator = self.config, self.config.generator
        is_supervised = isinstance(config.task, SupervisedTask)
        sizes: dict[str, Any] = {"num_steps": config.num_steps}
        if not is_supervised:
            sizes = {
                "capacity": config.capacity,
                "max_rollouts": config.max_rollouts,
                "running_requests": generator.running_requests(self.plan.device),
                "step_tokens": generator.step_tokens(self.plan.device),
                "published_versions": config.num_published_versions,
                "recorded_bytes_per_step": recorded_bytes(config, self.routed_bytes),
            }
        return {
            "configuration": self.identity if is_supervised else config,
            "policy": self.policy_dir,
            "num_weights": self.num_weights,
            "outputs": config.run_dir,
            "processes": self.plan,
            "memory_bytes": self.memory,
            **sizes,
            "first_step": 1 + (self.resume_point.step if self.resume_point else 0),
            "notes": self.notes,
        }

    def _describe_weights(self) -> str:
        trainer, replicas = self.plan.trainer, self.plan.replicas
        if trainer is None or not replicas:
            return ""
        transport = choose_transport(
            self.config.weight_sync.transport,
            trainer_hosts=trainer.rank_hosts or (trainer.host,),
            replica_hosts=[group.host for group in replicas],
        )
        what = "weights" if self.config.adapters is None else "adapters"
        return (
            f"{what}: at most {self.config.num_published_versions} versions published at a time, "
            f"{_TRANSPORTS[transport]}"
        )

    def _describe_teachers(self) -> str:
        teacher = self.config.teacher
        if not teacher.is_on:
            return ""
        names = [
            f"{source if found is None or found.directory is None else found.directory}"
            f"{f' ({found.model})' if found is not None and found.model else ''}"
            for source in teacher.sources
            for found in [self.teachers.get(source)]
        ]
        rewards = "alone" if self.config.rollout.advantage == "none" else "in addition to rewards"
        where = " (in the trainer)" if teacher.is_in_trainer else ""
        return f"teacher: {', '.join(names)}{where}; coefficient {teacher.coefficient:g}, {rewards}"

    def _describe_mixing(self) -> str:
        weight, examples = self.config.trainer.sft_coefficient, self.config.examples
        if not weight:
            return ""
        return (
            f"supervised loss: {weight:g} times that of {examples.per_step} conversations a step, "
            f"from {', '.join(examples.train)}"
        )

    def _describe_training(self) -> str:
        trainer = self.config.trainer
        shared = "once" if trainer.share_prefixes else "in each (trainer.share_prefixes is off)"
        lora = self.config.policy.lora
        adapters = f"adapters of rank {lora.rank} on {' '.join(lora.target_modules)}; "
        return (adapters if lora.rank else "") + (
            f"at most {trainer.max_tokens_per_microbatch:,} tokens in a forward pass of a rank; "
            f"tokens that several episodes begin with are computed {shared}"
        )

    def _describe_evaluation(self) -> str:
        evaluation = self.config.evaluation
        if not evaluation.num_problems:
            return "none"
        every = f", every {evaluation.every} steps" if evaluation.every else ""
        problems = count(evaluation.num_problems, "problem")
        rollouts = count(evaluation.samples_per_problem, "rollout")
        return f"{problems}, {rollouts} each, before the first step{every} and after the last"

    def _describe_recording(self) -> str:
        size = recorded_bytes(self.config, self.routed_bytes)
        if not size:
            return ""
        sampling = self.config.rollout.sampling
        is_cut = sampling.top_p < 1.0 or sampling.top_k or sampling.min_p
        return (
            f"recording: every rollout, at most {size / 2**20:,.1f} MiB a step and "
            f"{size * self.config.num_steps / 2**30:,.2f} GiB in all"
            + (", without the sets of tokens that top_p, top_k and min_p keep" if is_cut else "")
        )

    def describe_start(self, step: int | None) -> str:
        """``step``: of the checkpoint from which the run continues; None without one."""
        run_dir = self.config.run_dir
        if step is not None:
            return f"continues from the checkpoint of step {step} in {run_dir}"
        if self.resume_point is not None:
            return f"step 1 again; {run_dir} has no checkpoint yet"
        return "step 1" + (
            f"; {run_dir} holds nothing to resume" if self.config.checkpoint.resume else ""
        )


def describe_replica(generator: GeneratorConfig, device: Literal["cpu", "cuda"]) -> str:
    """Describe the sizes that depend on the device, or whose engines generate."""
    if generator.endpoint:
        return f"generation: by the engines of {generator.endpoint}"
    return (
        f"generation: at most {count(generator.running_requests(device), 'request')} and "
        f"{generator.step_tokens(device):,} tokens in a step of a replica"
    )


_TRANSPORTS = {
    Transport.SHARED_MEMORY: "in shared memory",
    Transport.RDMA: "sent by RDMA, or through Monarch's channels without such hardware",
    Transport.BOTH: "in shared memory on the trainer's host and by RDMA to the others, or through "
    "Monarch's channels without such hardware",
}
_SAMPLED_BYTES, _PROMPT_BYTES = 80, 7  # of a token in rollouts.jsonl
_TEACHER_BYTES = 45  # a token's score and advantage


def recorded_bytes(config: RunConfig, routed_bytes: int) -> int:
    """The most bytes that a step adds to ``rollouts.jsonl`` with ``metrics.rollouts_per_step``
    ``all``; 0 without it. Each turn repeats the tokens of the turns before it in its prompt, but
    not their experts, which are written in base64."""
    if config.rollouts_per_step != "all":
        return 0
    rollout = config.rollout
    sampled_bytes = _SAMPLED_BYTES + (_TEACHER_BYTES if config.teacher.is_on else 0)
    token_bytes = sampled_bytes + _PROMPT_BYTES * (rollout.max_turns + 1) // 2
    token_bytes += -(-4 * routed_bytes // 3)
    num_rollouts = rollout.groups_per_step * rollout.group_size
    return num_rollouts * rollout.max_total_tokens * token_bytes


AskHosts = Callable[[Path], tuple[HostFacts, ...]]
"""Attaches to the hosts of a run, given the policy's directory on this machine; returns the facts
about each host. Raises `ConfigError` if a host cannot be used."""


def prepare_run(
    config: RunConfig, machine: HostFacts | None = None, *, ask_hosts: AskHosts | None = None
) -> PreparedRun:
    """Find the policy, check everything and plan the processes. ``machine`` replaces the facts
    about this machine.

    With ``launch.hosts`` the hosts are made up, so the policy may be missing on this machine; then
    the plan has the published sizes of the model, or a note says that they are not known. With
    other hosts, ``ask_hosts`` is called after all other checks have passed, and the plan is made
    for the hosts' facts.

    Raises:
        ConfigError: the run cannot start. The exception lists all errors of single fields or, if
            there are none, all other errors.
    """
    check_fields(config)
    if config.mode != "both":  # nothing to compare before and after
        config = replace(config, evaluation=replace(config.evaluation, num_problems=0))
    if config.mode == "generate":  # no new policy
        config = replace(config, checkpoint=replace(config.checkpoint, export_hf=False))
    machine, keys = machine or machine_facts(), Keys.of()
    loss, advantage = config.trainer.loss.function, config.rollout.advantage
    notes = [f"loss: {loss} (trainer.loss.function)"] if loss else []
    if advantage not in ADVANTAGE_KINDS:
        notes.append(f"advantage: {advantage} (rollout.advantage)")
    notes += agent_notes(config.task, config.endpoint)
    policy_dir: Path | None = None
    policy: PolicyFacts | None = None
    errors: list[str] = []
    checkpoint, is_here = config.policy.checkpoint, True
    if config.launch.hosts and is_elsewhere(checkpoint):
        policy, is_here = published_facts(checkpoint), False
    if policy is None:
        try:
            policy_dir, policy = find_policy(checkpoint, is_trained=True)
            is_here = True
        except ConfigError as error:
            errors = error.errors if is_here else []
    if not is_here:
        policy_dir = Path(checkpoint)
    teachers: dict[str, FoundTeacher] = {}
    if policy is not None and policy_dir is not None and is_here:
        is_on_cpu = not machine.cuda_devices
        teachers, found = find_teachers(config, policy_dir, policy, is_on_cpu=is_on_cpu)
        errors += found
    of_teachers = [one.facts for one in teachers.values() if one.facts is not None]
    errors += find_errors(config, policy, machine, keys, of_teachers)
    problems, found = find_problems(config)
    errors += found
    is_supervised = isinstance(config.task, SupervisedTask)
    if not errors and policy_dir is not None and is_here:
        errors, found = row_errors(config, policy_dir)
        notes += found
    identity: dict[str, Any] = {}
    resume_point: ResumePoint | None = None
    if policy is not None and policy_dir is not None and is_here:
        if not has_hosts(config.launch) and not is_supervised:
            no_room, note = find_weight_room(config, policy, machine)
            errors += [no_room] if no_room else []
            notes += [note] if note else []
        identity = run_identity(config, policy_dir) | teacher_identity(teachers)
        _, found, _ = compare_with_saved(config, identity)
        errors += found
    if errors or policy_dir is None:
        raise ConfigError(errors)
    plan, of_hosts = _plan(config, policy_dir, policy, machine, ask_hosts)
    config, decisions = _decided(config, plan)
    notes += decisions
    if policy is not None and is_here:  # once more, with what only the plan decides
        identity = run_identity(config, policy_dir) | teacher_identity(teachers)
        resume_point, _, changes = compare_with_saved(config, identity)
        notes += changes
    notes += of_hosts
    compiled = ["attention kernels"] if plan.device == "cuda" else []
    compiled += ["the model (trainer.compile)"] if config.trainer.compile else []
    if config.mode != "generate" and compiled:
        time = "minutes" if plan.device == "cuda" else "10 to 40 s"
        what = " and ".join(compiled)
        notes.append(f"the first training steps compile {what}, which takes {time}")
    notes += start_notes(
        config.task,
        step_timeout_s=config.rollout.step_timeout_s,
        num_rollouts=config.max_rollouts,
        num_cores=machine.num_cores,
    )
    if not is_here:
        how = "the plan has its published sizes"
        how = "whether the run fits it was not checked" if policy is None else how
        notes.append(f"policy.checkpoint is {checkpoint!r}: it is not on this machine, so {how}")
    memory = None
    if policy is not None:
        size = device_bytes(plan.hosts or [machine])
        memory = memory_plan(
            config, policy, device=plan.device, device_bytes=size, teachers=of_teachers
        )
    return PreparedRun(
        config=config,
        policy_dir=policy_dir,
        plan=plan,
        keys=keys,
        evaluation_problems=problems,
        notes=tuple(notes),
        num_weights=None if policy is None else policy.num_weights,
        memory=memory,
        identity=identity,
        resume_point=resume_point,
        routed_bytes=_routed_bytes(config, policy, plan.device),
        teachers=teachers,
    )


def _routed_bytes(
    config: RunConfig, policy: PolicyFacts | None, device: Literal["cpu", "cuda"]
) -> int:
    """`PreparedRun.routed_bytes`. Only engines on a CPU record experts."""
    architecture = None if policy is None else policy.architecture
    is_off = config.rollout.replay_routing is False or device != "cpu"
    if is_off or architecture is None or architecture.experts is None:
        return 0
    return architecture.num_expert_layers * architecture.experts.per_token


def _decided(config: RunConfig, plan: ProcessPlan) -> tuple[RunConfig, list[str]]:
    """Replace the values that the device decides, and say which."""
    loss = decided_loss(
        config.trainer.loss,
        rounds=plan.device == "cuda" and config.policy.dtype == "bfloat16",
        staleness=config.schedule.staleness,
    )
    changed = replace(config, trainer=replace(config.trainer, loss=loss))
    if plan.trainer is None or loss.proximal_policy == config.trainer.loss.proximal_policy:
        return changed, []
    return changed, [
        f"loss: importance_weight {loss.importance_weight}, proximal_policy "
        f"{loss.proximal_policy} (trainer.loss.importance_weight auto, in bfloat16; none turns it "
        "off)"
    ]


@contextmanager
def claim_run(prepared: PreparedRun) -> Iterator[Lease]:
    """Make the run's folder if it does not exist, hold its lock and lease, and write the run's
    identity.

    Raises:
        ConfigError: another process holds the folder, or has changed it since `prepare_run`; or the
            folder cannot be written to.
    """
    run_dir = prepared.config.run_dir
    with hold_run(run_dir) as lease:
        if errors := path_errors(prepared.config):
            raise ConfigError(errors)
        try:
            (run_dir / MANIFEST).unlink(missing_ok=True)
            write_identity(run_dir, prepared.identity)
            prepared.config.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(run_dir, error) from error
        yield lease


def _plan(
    config: RunConfig,
    policy_dir: Path,
    policy: PolicyFacts | None,
    machine: HostFacts,
    ask_hosts: AskHosts | None,
) -> tuple[ProcessPlan, list[str]]:
    launch = config.launch
    if not has_hosts(launch):
        cores = sorted(os.sched_getaffinity(0))[: machine.num_cores]
        return plan_processes(config, devices=machine.cuda_devices, cores=cores), []
    if launch.hosts:
        hosts = made_up_hosts(launch.hosts, launch.attach)
    elif ask_hosts is not None:
        hosts = ask_hosts(policy_dir)
        config = hosts_by_mesh(config, hosts)
    else:
        raise ConfigError(
            "launch.attach, launch.job: only torchtitan-rl train uses other hosts; leave them out"
        )
    if errors := errors_on_hosts(config, policy, hosts):
        raise ConfigError(errors)
    plan = plan_on_hosts(config, hosts)
    return plan, host_notes(config.launch, plan)
