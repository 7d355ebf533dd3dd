"""All checks of a run's configuration: one message per error, before a process starts.

Each message names the field, its value and the fix. First, `bounds.field_errors` checks each field
by itself. If no field has an error, `find_errors` checks the fields against each other, and against
the policy and the machine. A user sees all messages of one of these checks at once.
"""

from __future__ import annotations

import importlib.util
import math
import operator
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter

from torchtitan_rl.agents.task import AgentTask, agent_errors
from torchtitan_rl.bounds import load_function
from torchtitan_rl.config.hosts import host_errors, launch_errors
from torchtitan_rl.config.images import engine_image_errors, trainer_image_errors
from torchtitan_rl.config.lora import LoraConfig, lora_errors
from torchtitan_rl.config.machine import HostFacts, device_of
from torchtitan_rl.config.model import PolicyFacts
from torchtitan_rl.config.room import machine_errors
from torchtitan_rl.config.run import RunConfig, has_hosts, path_errors
from torchtitan_rl.config.tenants import served_errors
from torchtitan_rl.config.vllm_options import vllm_option_errors, vllm_run_errors
from torchtitan_rl.environments.mcp import STARTS_PER_CORE, McpServer, McpTask, parts_of
from torchtitan_rl.environments.open_env import OpenEnvTask
from torchtitan_rl.environments.supervised import SupervisedTask
from torchtitan_rl.errors import ConfigError, TorchtitanRLError
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.generation.decision import kv_policy_errors
from torchtitan_rl.orchestration.config import capacity_errors
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.episodes import ADVANTAGE_KINDS, turn_advantages
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.serving.config import Keys, endpoint_errors
from torchtitan_rl.training.config import (
    LossConfig,
    ProfileConfig,
    TrainerConfig,
    decided_loss,
)
from torchtitan_rl.types import (
    UNKNOWN_EXPERT,
    Completion,
    FinishReason,
    Rollout,
    RolloutStatus,
    Turn,
    VersionRun,
)

# The smallest block that vLLM's CPU attention supports; the attention reads whole blocks. With this
# size, the tiny policy decodes 15 % faster than with vLLM's default of 128 tokens, and a 135M
# policy equally fast. Common prefixes can be shared if they have at least 32 tokens, not only from
# 128 tokens on.
CPU_BLOCK_TOKENS = 32

_TOKEN_PARTS = ("context_parallel", "tensor_parallel")
_ORDERED = (  # a field, a relation, and one or several other fields
    "rollout.max_total_tokens <= generator.max_model_len",
    "rollout.sampling.max_tokens_per_turn < rollout.max_total_tokens",
    "rollout.overlong.buffer_tokens <= rollout.sampling.max_tokens_per_turn",
    "trainer.max_episode_tokens >= rollout.max_total_tokens",
    "trainer.max_tokens_per_microbatch >= trainer.max_episode_tokens",
    "trainer.updates_per_batch <= rollout.groups_per_step",
    "rollout.step_timeout_s <= rollout.rollout_timeout_s",
    "generator.request_timeout_s <= rollout.rollout_timeout_s",
    "weight_sync.lag_timeout_s <= weight_sync.timeout_s",
    "schedule.max_wait_s > schedule.report_wait_s rollout.rollout_timeout_s weight_sync.timeout_s",
)
_NOT_STUCK = ", or it ends work that is not stuck"
_REASONS = {  # by the first field
    "rollout.sampling.max_tokens_per_turn": ", prompt included",
    "trainer.max_episode_tokens": ", so that every episode fits",
    "trainer.updates_per_batch": ", for a minibatch has whole groups",
    "schedule.max_wait_s": _NOT_STUCK,
    "endpoint.session_timeout_s": _NOT_STUCK,
    "teacher.timeout_s": _NOT_STUCK,
}
_RELATIONS = {
    "<=": (operator.le, "at most"),
    "<": (operator.lt, "less than"),
    ">=": (operator.ge, "at least"),
    ">": (operator.gt, "more than"),
}


def find_errors(
    config: RunConfig,
    policy: PolicyFacts | None,
    machine: HostFacts,
    keys: Keys | None = None,
    teachers: Sequence[PolicyFacts] = (),
) -> list[str]:
    """All contradictions in ``config`` for this policy on this machine; empty if the run can start.
    `check_fields` must have passed. Without a policy, checks that depend on it are left out.
    ``teachers`` are checkpoints, which `find_teachers` checks. The task and its problems are
    checked by `find_problems`, several hosts by `errors_on_hosts`."""
    if isinstance(config.task, SupervisedTask):
        return supervised_errors(config, policy, machine)
    rollout, schedule, trainer = config.rollout, config.schedule, config.trainer
    capacity = capacity_errors(
        staleness=schedule.staleness, max_share=schedule.max_overtaking_share
    )
    errors = [*capacity, *_relation_errors(config), *_limit_errors(config.task, rollout)]
    on_hosts = has_hosts(config.launch)
    if policy is not None:
        errors += _policy_errors(config, policy)
        is_on_cuda = not on_hosts and bool(machine.cuda_devices)
        errors += replay_errors(rollout, policy, is_on_cuda=is_on_cuda)
        if not on_hosts:
            is_on_cpu = not machine.cuda_devices
            errors += generator_errors(config.generator, policy, is_on_cpu=is_on_cpu)
    errors += lora_errors(config.policy.lora)
    errors += served_errors(config)
    errors += vllm_run_errors(config)
    errors += launch_errors(config)
    errors += tracker_errors(config.metrics.trackers)
    if not capacity:
        errors += machine_errors(config, policy, machine, teachers)
    errors += loss_errors(
        trainer.loss, staleness=schedule.staleness, updates=trainer.updates_per_batch
    )
    errors += advantage_errors(rollout)
    errors += pair_errors(trainer.loss, rollout, is_taught=config.teacher.is_on)
    errors += _mixing_errors(config)
    errors += _profile_errors(config)
    errors += kv_policy_errors(
        resets=config.weight_sync.reset_prefix_cache_on_pull,
        recomputes=config.weight_sync.recompute_running_on_pull,
        drains=config.weight_sync.mode == "drain",
    )
    if config.endpoint.enabled:
        errors += endpoint_errors(config.endpoint, keys or Keys.of())
    if isinstance(config.task, AgentTask) and not capacity:
        errors += agent_errors(config.task, config.endpoint, num_rollouts=config.max_rollouts)
    return errors + path_errors(config)


def supervised_errors(
    config: RunConfig, policy: PolicyFacts | None, machine: HostFacts
) -> list[str]:
    """Like `find_errors`, for a run on conversations: only what such a run reads is checked."""
    trainer = config.trainer
    errors = _order_errors(
        config, "trainer.max_tokens_per_microbatch >= trainer.max_episode_tokens"
    )
    errors += _split_errors(trainer)
    if policy is not None:
        errors += _policy_errors(config, policy)
        if trainer.max_episode_tokens > policy.max_positions:
            errors.append(
                f"trainer.max_episode_tokens is {trainer.max_episode_tokens}: the policy has "
                f"{policy.max_positions} positions; give at most that"
            )
    errors += lora_errors(config.policy.lora)
    for name in ("loss", "updates_per_batch", "sft_coefficient"):
        if getattr(trainer, name) != getattr(TrainerConfig(), name):
            errors.append(
                f"trainer.{name} is {getattr(trainer, name)}: it is of reinforcement learning, and "
                "this run does not read it; leave it out"
            )
    errors += launch_errors(config)
    errors += tracker_errors(config.metrics.trackers)
    errors += machine_errors(config, policy, machine)
    return [*errors, *_profile_errors(config), *path_errors(config)]


def _policy_errors(config: RunConfig, policy: PolicyFacts) -> list[str]:
    trainer, lora = config.trainer, config.policy.lora
    name = "trainer.tensor_parallel"
    if trainer.context_parallel > 1:
        name = "trainer.context_parallel" + (f" x {name}" if trainer.tensor_parallel > 1 else "")
    return [
        *head_errors(name, trainer.token_parts, policy),
        *expert_errors(trainer, policy, lora),
        *trainer_image_errors(trainer, policy, lora, config.teacher),
    ]


def _mixing_errors(config: RunConfig) -> list[str]:
    weight, files = config.trainer.sft_coefficient, config.examples.train
    if bool(weight) != bool(files):
        return [
            f"trainer.sft_coefficient is {weight:g} and examples.train names {len(files)} files: "
            "give both, or neither"
        ]
    if weight and config.mode != "both":
        return [f"trainer.sft_coefficient is {weight:g}: with mode {config.mode} give 0"]
    return []


def _split_errors(trainer: TrainerConfig) -> list[str]:
    """Check that the ranks that share a pass can split its tokens between layers."""
    ranks = trainer.token_parts
    names = [f"trainer.{name}" for name in _TOKEN_PARTS if getattr(trainer, name) > 1]
    return [
        f"trainer.{name} is {getattr(trainer, name)}: give a multiple of {' x '.join(names)} "
        f"({ranks})"
        for name in ("max_episode_tokens", "max_tokens_per_microbatch")
        if getattr(trainer, name) % ranks
    ]


def errors_on_hosts(
    config: RunConfig, policy: PolicyFacts | None, hosts: Sequence[HostFacts]
) -> list[str]:
    """Errors if the run does not fit on its hosts; for runs with ``launch.attach`` or
    ``launch.hosts``. `find_errors` finds all other errors."""
    is_on_cpu = device_of(hosts) == "cpu"
    if isinstance(config.task, SupervisedTask):
        errors = []
    elif policy is None:
        errors = vllm_option_errors(config.generator, is_on_cpu=is_on_cpu)
    else:
        errors = generator_errors(config.generator, policy, is_on_cpu=is_on_cpu)
        errors += replay_errors(config.rollout, policy, is_on_cuda=not is_on_cpu)
    return errors + host_errors(config, policy, hosts)


def _relation_errors(config: RunConfig) -> list[str]:
    ordered = list(_ORDERED)
    if isinstance(config.task, AgentTask):
        ordered.append("endpoint.session_timeout_s > rollout.step_timeout_s")
    if config.teacher.is_on:
        ordered.append("teacher.timeout_s < schedule.max_wait_s")
    errors = [error for relation in ordered for error in _order_errors(config, relation)]
    if config.mode == "generate" and config.is_colocated:
        errors.append(
            "placement is colocated: with mode generate there is no trainer to share devices with; "
            "give separate"
        )
    if (config.mode == "train") != (config.rollouts is not None):
        errors.append(
            f"rollouts is {config.rollouts}: it is the folder of the recorded run with mode train "
            f"and nothing otherwise, and mode is {config.mode}"
        )
    errors += _split_errors(config.trainer)
    if config.is_colocated and config.evaluation.reserves_replica:
        errors.append(
            "evaluation.placement is reserved: with placement colocated nothing is generated "
            "alongside training; give shared"
        )
    elif config.evaluation.reserves_replica and config.generator.replicas < 2:
        errors.append(
            "evaluation.placement is reserved: give at least 2 generator.replicas, or shared"
        )
    if (
        config.is_colocated
        and config.weight_sync.transport == "rdma"
        and not has_hosts(config.launch)
    ):
        errors.append(
            "weight_sync.transport is rdma: with placement colocated trainer and replicas are on "
            "one machine; give shared_memory or auto"
        )
    return errors


def _order_errors(config: RunConfig, relation: str) -> list[str]:
    """At most one message, for a relation such as those in `_ORDERED`."""
    name, sign, *others = relation.split()
    holds, words = _RELATIONS[sign]
    value = attrgetter(name)(config)
    bounds = {other: attrgetter(other)(config) for other in others}
    broken = [
        f"{other} ({bound})"
        for other, bound in bounds.items()
        if value is not None and not holds(value, bound)
    ]
    reason = _REASONS.get(name, "")
    return [f"{name} is {value}: give {words} {' and '.join(broken)}{reason}"] if broken else []


def _limit_errors(task: Task, rollout: RolloutConfig) -> list[str]:
    errors = []
    for name, part in parts_of(task):
        limits: tuple[str, ...] = ()
        if isinstance(part, McpServer):
            limits = ("start_timeout_s", "call_timeout_s")
        elif isinstance(part, OpenEnvTask):
            limits = ("connect_timeout_s",)
        errors += [
            f"{name}.{limit} is {value}: give less than rollout.step_timeout_s "
            f"({rollout.step_timeout_s})"
            for limit in limits
            if (value := getattr(part, limit)) >= rollout.step_timeout_s
        ]
    return errors


_TRACKER_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}


def tracker_errors(names: Sequence[str]) -> list[str]:
    """An error for each tracker whose package is not installed."""
    return [
        f"metrics.trackers has {name!r}, which is not installed; run pip install {package}, or "
        "leave it out"
        for name, package in _TRACKER_PACKAGES.items()
        if name in names and importlib.util.find_spec(name) is None
    ]


def start_notes(
    task: Task, *, step_timeout_s: float, num_rollouts: int, num_cores: int
) -> list[str]:
    """A warning for each task whose MCP servers may not be ready within a step's time-out, if they
    are started for ``num_rollouts`` rollouts at the same time."""
    at_once = STARTS_PER_CORE * num_cores
    notes = []
    for name, part in parts_of(task):
        servers = part.servers.values() if isinstance(part, McpTask) else ()
        starts = [one.start_timeout_s for one in servers if one.command and not one.shared]
        number = num_rollouts * len(starts)
        rounds = math.ceil(number / at_once)
        if rounds * max(starts, default=0.0) > step_timeout_s:
            notes.append(
                f"warning: {name}.servers: {num_rollouts} rollouts at once start {number} servers, "
                f"{at_once} at a time: where a start takes more than "
                f"{step_timeout_s / rounds:.2g} s, the last ones are not there within "
                f"rollout.step_timeout_s ({step_timeout_s:g} s) and their rollouts fail; raise "
                "that, share servers without state (shared), or, if each start takes less, say so "
                "by start_timeout_s"
            )
    return notes


def generator_errors(
    generator: GeneratorConfig, policy: PolicyFacts, *, is_on_cpu: bool
) -> list[str]:
    """Check the fields against each other and against the policy, but not against devices and
    memory. One message per error."""
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
        blocks = math.ceil(generator.max_model_len / CPU_BLOCK_TOKENS) + 1  # vLLM reserves one
        values = policy.kv_values("cpu", generator.tensor_parallel)
        needed = 4 * blocks * CPU_BLOCK_TOKENS * values  # float32
        if generator.kv_cache_bytes < needed:
            errors.append(
                f"generator.kv_cache_bytes is {generator.kv_cache_bytes}: one request of "
                f"generator.max_model_len ({generator.max_model_len}) tokens takes {needed}; give "
                "at least that, better many times as much"
            )
    most = generator.step_tokens("cpu" if is_on_cpu else "cuda")
    if generator.max_running_requests is not None and generator.max_running_requests > most:
        errors.append(
            f"generator.max_running_requests is {generator.max_running_requests}: a step of an "
            f"engine takes {most} tokens, one or more of each request; give at most that"
        )
    errors += engine_image_errors(generator, policy)
    return errors + vllm_option_errors(generator, is_on_cpu=is_on_cpu)


def head_errors(name: str, degree: int, policy: PolicyFacts) -> list[str]:
    """An error if the policy's heads cannot be split evenly over ``degree`` ranks."""
    if degree <= 0 or not (policy.num_heads % degree or policy.num_kv_heads % degree):
        return []
    return [
        f"{name} is {degree}: give a divisor of the policy's {policy.num_heads} heads and "
        f"{policy.num_kv_heads} key/value heads"
    ]


def expert_errors(trainer: TrainerConfig, policy: PolicyFacts, lora: LoraConfig) -> list[str]:
    """An error if the policy's experts cannot be distributed over the trainer's ranks, or get
    adapters."""
    parallel, tensor = trainer.expert_parallel, trainer.tensor_parallel
    what = f"trainer.expert_parallel is {parallel}"
    experts = policy.architecture.experts if policy.architecture is not None else None
    if experts is None:
        return [f"{what}: the policy has no experts; give 1"] if parallel > 1 else []
    if lora.rank:
        # On a CPU, vLLM's layers with experts and adapters need Triton.
        return [
            f"policy.lora.rank is {lora.rank}: a policy with experts cannot get adapters; give 0, "
            "or a dense policy"
        ]
    ranks = trainer.num_shards * tensor
    if ranks % parallel or parallel % tensor:
        # With tensor parallelism alone, torchtitan's gradients of experts are wrong.
        return [
            f"{what}: give a divisor of trainer.data_parallel_shard x trainer.context_parallel x "
            f"trainer.tensor_parallel ({ranks}) that is a multiple of trainer.tensor_parallel "
            f"({tensor})"
        ]
    if not experts.can_be_split(parallel, ranks=ranks):
        return [
            f"{what}: the policy has {experts.number} experts in each layer, which {parallel} of "
            f"{ranks} ranks do not divide evenly; give other trainer.expert_parallel and "
            "trainer.data_parallel_shard"
        ]
    return []


def replay_errors(rollout: RolloutConfig, policy: PolicyFacts, *, is_on_cuda: bool) -> list[str]:
    """An error if the choices of the policy's experts cannot be recorded."""
    if policy.architecture is None or rollout.replay_routing is False:
        return []
    experts = policy.architecture.experts
    if experts is None and rollout.replay_routing:
        return ["rollout.replay_routing is on: the policy has no experts; leave it out"]
    if experts is not None and experts.number > UNKNOWN_EXPERT:
        return [
            f"rollout.replay_routing is on: the policy has {experts.number} experts in each layer, "
            f"and choices among at most {UNKNOWN_EXPERT} are recorded; give false"
        ]
    if is_on_cuda and rollout.replay_routing:
        return [
            "rollout.replay_routing is on: engines on CUDA do not record the experts that they "
            "choose; leave it out"
        ]
    return []


def loss_errors(config: LossConfig, *, staleness: int, updates: int = 1) -> list[str]:
    """One message per error: field, value, fix. ``staleness`` is `ScheduleConfig.staleness`,
    ``updates`` is `TrainerConfig.updates_per_batch`."""
    if errors := _unread(config):
        return errors
    errors = _corrections(config, staleness, updates)
    if config.aggregation == "constant" and config.constant_length < 1:
        errors.append(
            f"trainer.loss.constant_length is {config.constant_length}: "
            "trainer.loss.aggregation constant divides by it; give the longest response in tokens, "
            "rollout.max_total_tokens for one"
        )
    if config.aggregation != "constant" and config.constant_length != 0:
        errors.append(
            f"trainer.loss.constant_length is {config.constant_length}: "
            f"trainer.loss.aggregation {config.aggregation} does not read it; give 0, or constant"
        )
    if config.function:
        from torchtitan_rl.training.losses import loss_problem  # importing torch takes seconds

        try:
            problem = loss_problem(load_function(config.function), config, updates)
        except ConfigError as error:
            problem = str(error)
        if problem:
            errors.append(f"trainer.loss.function is {config.function!r}: {problem}")
    return errors


def _profile_errors(config: RunConfig) -> list[str]:
    steps, ranks = config.profile.steps, config.profile.ranks
    if steps and config.mode == "generate":
        return ["profile.steps: mode generate trains nothing; leave it out"]
    errors = []
    chosen = {"ranks": ranks != ProfileConfig.ranks, "replicas": config.profile.replicas != ()}
    for name in (name for name, is_given in chosen.items() if is_given and not steps):
        value = getattr(config.profile, name)
        errors.append(f"profile.{name} is {value}: no step is profiled; give profile.steps, too")
    if steps and max(steps) > config.num_steps:
        errors.append(
            f"profile.steps has {max(steps)}: the run has {config.num_steps} steps; give at most "
            "that"
        )
    if steps and any(rank >= config.trainer.world_size for rank in ranks):
        errors.append(
            f"profile.ranks has {max(ranks)}: the trainer's ranks are 0 to "
            f"{config.trainer.world_size - 1}; give some of these"
        )
    replicas = config.profile.replicas
    if steps and replicas and config.mode == "train":
        errors.append(f"profile.replicas is {replicas}: this run has no replicas; leave it out")
    elif steps and any(replica >= config.generator.replicas for replica in replicas):
        errors.append(
            f"profile.replicas has {max(replicas)}: the replicas are 0 to "
            f"{config.generator.replicas - 1}; give some of these"
        )
    return errors


def advantage_errors(config: RolloutConfig) -> list[str]:
    """One message per error: field, value, fix."""
    errors = []
    for name in ("turn_discount", "final_reward_weight"):
        value = getattr(config, name)
        if config.credit == "outcome" and value != 1.0:
            errors.append(
                f"rollout.{name} is {value}: rollout.credit outcome does not read it; give 1, or "
                "rollout.credit turn"
            )
    if config.credit == "turn" and not config.final_reward_weight and config.overlong.buffer_tokens:
        errors.append(
            "rollout.final_reward_weight is 0: the penalty of rollout.overlong.buffer_tokens is "
            "taken off the reward that it weighs; give a weight, or 0 tokens"
        )
    if config.advantage not in ADVANTAGE_KINDS:
        try:
            load_function(config.advantage)
            for size in (1, 3):  # a single rollout is left if all others of its group fail
                siblings = [_made_rollout(number) for number in range(size)]
                turn_advantages(siblings, replace(config, credit="outcome"))
        except TorchtitanRLError as error:
            kinds = ", ".join(ADVANTAGE_KINDS)
            errors.append(f"rollout.advantage is {config.advantage!r}: {error}; built in: {kinds}")
    return errors


def _made_rollout(number: int) -> Rollout:
    completion = Completion(
        request_id=f"made/r{number}/t0",
        token_ids=(number,),
        logprobs=(-1.0,),
        version_runs=(VersionRun(0, 0),),
        finish_reason=FinishReason.STOP,
    )
    return Rollout(
        rollout_id=f"made/r{number}",
        group_id="made",
        problem_id="made",
        turns=(Turn(prompt_token_ids=(0,), completion=completion),),
        status=RolloutStatus.COMPLETED,
        reward=number / 2,
    )


def _corrections(config: LossConfig, staleness: int, updates: int) -> list[str]:
    errors = []
    config = decided_loss(config, rounds=False, staleness=staleness)
    if config.proximal_policy == "behaviour" and config.importance_weight != "none":
        errors.append(
            f"trainer.loss.importance_weight is {config.importance_weight}: with "
            "trainer.loss.proximal_policy behaviour the ratio already is policy / behaviour, and a "
            "weight would correct twice; give none, or trainer.loss.proximal_policy recomputed"
        )
    if config.proximal_policy == "interpolated" and staleness == 0:
        errors.append(
            "trainer.loss.proximal_policy is interpolated: with schedule.staleness 0 no version "
            "lies between behaviour and policy; give recomputed or behaviour"
        )
    elif config.proximal_policy != "behaviour" and config.importance_weight == "none":
        errors.append(
            f"trainer.loss.proximal_policy is {config.proximal_policy}: without a weight nothing "
            "corrects for the policy that sampled the tokens; give importance_weight token or "
            "sequence, or proximal_policy behaviour"
        )
    if config.proximal_policy == "recomputed" and config.ratio == "sequence" and updates == 1:
        errors.append(
            "trainer.loss.ratio is sequence: with proximal_policy recomputed every ratio is 1 and "
            "the choice would do nothing; give token, or importance_weight sequence for a "
            "sequence-level correction"
        )
    return errors


def _unread(config: LossConfig) -> list[str]:
    why, unread = "it is read only with surrogate dpo", {"dpo_beta"}
    if config.surrogate == "dpo":
        why = "surrogate dpo does not read it"
        unread = {one.name for one in fields(config)} - {"surrogate", "dpo_beta", "max_log_ratio"}
        if config.importance_weight == "none":  # what a run makes of the default
            unread.remove("importance_weight")
    return [
        f"trainer.loss.{one.name} is {getattr(config, one.name)}: {why}; leave it out"
        for one in fields(config)
        if one.name in unread and getattr(config, one.name) != one.default
    ]


def pair_errors(loss: LossConfig, rollout: RolloutConfig, *, is_taught: bool) -> list[str]:
    """One message per error in the options of online DPO: field, value, fix."""
    errors = []
    if loss.surrogate == "dpo" and rollout.advantage != "pair":
        errors.append(
            f"trainer.loss.surrogate is dpo: rollout.advantage is {rollout.advantage}, and the "
            "loss is of the best and the worst rollout of each group; give rollout.advantage pair"
        )
    if rollout.advantage == "pair" and rollout.credit == "turn":
        errors.append(
            "rollout.credit is turn: rollout.advantage pair compares rollouts; give outcome"
        )
    if rollout.advantage == "pair" and is_taught:
        errors.append(
            "rollout.advantage is pair: a teacher scores all rollouts, and only a pair of each "
            "group is trained on; give another advantage, or no teacher"
        )
    return errors
