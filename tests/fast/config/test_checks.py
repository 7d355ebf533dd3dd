"""Which configurations are refused, and what the message says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_mutations import with_value
from torchtitan_rl.agents.task import AgentTask, RemoteAgentTask
from torchtitan_rl.bounds import field_errors
from torchtitan_rl.config import machine
from torchtitan_rl.config.checks import (
    expert_errors,
    find_errors,
    replay_errors,
    start_notes,
)
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.config.machine import (
    HostFacts,
    NoRoomError,
    machine_facts,
    made_up_hosts,
    place,
)
from torchtitan_rl.config.model import Experts, PolicyFacts
from torchtitan_rl.config.published import published_facts
from torchtitan_rl.config.room import serving_errors, weight_room
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.configs.calculator_agent_tiny import config as AGENTS
from torchtitan_rl.data.conversations import ExamplesConfig
from torchtitan_rl.data.curriculum import RestConfig
from torchtitan_rl.environments.judge import JudgeConfig, JudgedTask
from torchtitan_rl.environments.mcp import McpServer, McpTask
from torchtitan_rl.environments.mixture import MixtureTask
from torchtitan_rl.environments.open_env import OpenEnvTask
from torchtitan_rl.environments.reasoning_gym import ReasoningGymTask
from torchtitan_rl.environments.supervised import SupervisedTask
from torchtitan_rl.experiments.search_r1.task import SearchR1Task
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.sandbox.sandbox import SandboxConfig, SandboxLimits
from torchtitan_rl.training.config import TrainerConfig

POLICY = PolicyFacts(
    num_heads=4,
    num_kv_heads=2,
    max_positions=1024,
    vocab_size=100,
    num_bytes=2 << 20,
    kv_values_per_token=512,
)
LAPTOP = HostFacts(num_cores=2, memory_bytes=24 << 30)
SHM, RUN = Path("/dev/shm"), Path("/runs/one")
MIB = 1 << 20
TOOLS = McpTask(
    train=("a",),
    servers={"s": McpServer(command=("true",), start_timeout_s=59.0, call_timeout_s=100.0)},
)
NO_TIME = SandboxConfig(limits=SandboxLimits(cpu_s=0))
GAME = OpenEnvTask(url="http://a", connect_timeout_s=60.0)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(policy=PolicyConfig(checkpoint="x"), task=Task(), output_dir=tmp_path)


def changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    for name, value in changes.items():
        config = with_value(config, name, value)
    return config


def complaints(
    config: RunConfig, changes: dict[str, Any] | None = None, machine: HostFacts = LAPTOP
) -> list[str]:
    config = changed(config, changes or {})
    return list(field_errors(config).values()) or find_errors(config, POLICY, machine)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (replace(TOOLS, check_timeout_s=0.0), "task.check_timeout_s is 0.0: it must be greater"),
        (replace(TOOLS, rest=RestConfig(epochs=-1)), "task.rest.epochs is -1: it must be greater"),
        (replace(TOOLS, sandbox=NO_TIME), "task.sandbox.limits.cpu_s is 0: it must be greater"),
        (
            replace(TOOLS, servers={"s": McpServer(url="http://b", call_timeout_s=0)}),
            "task.servers.s.call_timeout_s is 0: it must be greater",
        ),
        (replace(GAME, discount=0.0), "task.discount is 0.0: it must be greater"),
        (JudgedTask(task=replace(GAME, num_problems=0)), "task.task.num_problems is 0: it must be"),
        (
            JudgedTask(task=GAME, judge=JudgeConfig(default_score=5.0)),
            "task.judge.default_score is 5.0: it must be less",
        ),
        (RemoteAgentTask(lease_s=0.0), "task.lease_s is 0.0: it must be greater"),
        (AgentTask(reward_at_limit=float("nan")), "task.reward_at_limit is nan: it must be"),
        (ReasoningGymTask(tasks={}, validation_share=1.0), "task.validation_share is 1.0: it must"),
    ],
)
def test_numbers_of_a_task_have_bounds(task: Task, message: str) -> None:
    (error,) = field_errors(task, "task.").values()
    assert error.startswith(message)


PUBLISHED_METHODS: list[dict[str, Any]] = [
    {"surrogate": "cispo", "clip_low": 0.99},
    {"ratio": "sequence", "aggregation": "sequence_mean"},
    {"proximal_policy": "recomputed", "importance_weight": "token", "mask": "token"},
    {"proximal_policy": "interpolated", "importance_weight": "sequence", "ratio": "sequence"},
    {"mask": "geometric", "mask_low": 0.99, "mask_high": 1.01},
    {"aggregation": "constant", "constant_length": 256, "kl_coefficient": 0.01},
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout.sampling.top_p": 0.9, "rollout.sampling.top_k": 20},
        {"evaluation.temperature": 0.0},
        {"generator.kv_cache_bytes": (512 + 32) * 512 * 4},  # and vLLM's own block, in float32
        {"schedule.staleness": 2, "schedule.max_overtaking_share": 1.0},
        *({f"trainer.loss.{k}": v for k, v in one.items()} | {"schedule.staleness": 2}
          for one in PUBLISHED_METHODS),
        {"trainer.loss.surrogate": "dpo", "trainer.loss.dpo_beta": 0.3,
         "trainer.loss.importance_weight": "none", "rollout.advantage": "pair"},
        {"rollout.advantage": "pair", "schedule.staleness": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_sense_is_not_refused(config: RunConfig, changes: dict[str, Any]) -> None:
    assert complaints(config, changes) == []


LOSS = "trainer.loss."
DPO = {LOSS + "surrogate": "dpo", "rollout.advantage": "pair"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({LOSS + "surrogate": "dpo"}, "trainer.loss.surrogate is dpo: rollout.advantage is mean, and"),
    (DPO | {LOSS + "mask": "token"}, "trainer.loss.mask is token: surrogate dpo does not read"),
    (DPO | {LOSS + "kl_coefficient": 0.1}, "trainer.loss.kl_coefficient is 0.1: surrogate dpo"),
    (DPO | {"rollout.credit": "turn"}, "rollout.credit is turn: rollout.advantage pair"),
    (DPO | {"teacher.url": "http://a/v1"}, "rollout.advantage is pair: a teacher scores all"),
    ({LOSS + "dpo_beta": 0.2}, "trainer.loss.dpo_beta is 0.2: it is read only with surrogate"),
    ({"rollout.group_size": 1}, "rollout.group_size is 1: "),
    ({"rollout.sampling.top_p": 0.0}, "rollout.sampling.top_p is 0.0: "),
    ({"rollout.sampling.min_p": 1.0}, "rollout.sampling.min_p is 1.0: "),
    ({"rollout.sampling.temperature": 0.0}, "rollout.sampling.temperature is 0.0: give 0.01 to"),
    ({"evaluation.temperature": -1.0}, "evaluation.temperature is -1.0: give 0 (greedy) or"),
    ({"schedule.staleness": -1}, "schedule.staleness is -1: give 0 (synchronous) to 1024"),
    (
        {"schedule.staleness": 1, "schedule.max_overtaking_share": 0.7},
        "schedule.max_overtaking_share is 0.7: give 0 to 0.5",
    ),
    (
        {"rollout.max_total_tokens": 600, "trainer.max_episode_tokens": 600},
        "rollout.max_total_tokens is 600: give at most generator.max_model_len (512)",
    ),
    (
        {"rollout.max_total_tokens": 600, "generator.max_model_len": 600},
        "trainer.max_episode_tokens is 512: give at least rollout.max_total_tokens (600)",
    ),
    ({"trainer.updates_per_batch": 17}, "trainer.updates_per_batch is 17: give at most rollout.gr"),
    ({"generator.max_model_len": 2048}, "generator.max_model_len is 2048: the policy has 1024"),
    ({"generator.tensor_parallel": 3}, "generator.tensor_parallel is 3: give a divisor of"),
    ({"trainer.tensor_parallel": 4, "trainer.threads": 1}, "trainer.tensor_parallel is 4: "),
    (
        {"trainer.context_parallel": 4, "trainer.threads": 1},
        "trainer.context_parallel is 4: give a divisor of the policy's 4 heads and 2 key/value",
    ),
    (
        {"trainer.context_parallel": 2, "trainer.tensor_parallel": 2, "trainer.threads": 1},
        "trainer.context_parallel x trainer.tensor_parallel is 4: give a divisor of the policy's",
    ),
    (
        {"trainer.context_parallel": 2, "trainer.max_tokens_per_microbatch": 513},
        "trainer.max_tokens_per_microbatch is 513: give a multiple of trainer.context_parallel (2)",
    ),
    ({"generator.heartbeat_s": 1000.0}, "generator.heartbeat_s is 1000.0: give at most half of"),
    ({"generator.max_running_requests": 5000}, "generator.max_running_requests is 5000: a step"),
    ({"generator.kv_cache_bytes": 10}, "generator.kv_cache_bytes is 10: one request of generator."),
    (
        {"generator.kv_cache_bytes": 16 << 30},
        "generator.kv_cache_bytes is 17179869184: all processes need about",
    ),
    (
        {"trainer.data_parallel_shard": 7},
        "trainer.data_parallel_shard is 7: replicas and",
    ),
    ({"pin_cores": True}, "pin_cores is True: replicas and trainer compute in 4 threads"),
    # Time-outs: a limit that detects a stuck part is longer than the part may take.
    (
        {"rollout.step_timeout_s": 4000.0},
        "rollout.step_timeout_s is 4000.0: give at most rollout.rollout_timeout_s (3600.0)",
    ),
    (
        {"generator.request_timeout_s": 4000.0},
        "generator.request_timeout_s is 4000.0: give at most rollout.rollout_timeout_s (3600.0)",
    ),
    (
        {"weight_sync.lag_timeout_s": 301.0},
        "weight_sync.lag_timeout_s is 301.0: give at most weight_sync.timeout_s (300.0)",
    ),
    (
        {"schedule.max_wait_s": 50.0},
        "schedule.max_wait_s is 50.0: give more than schedule.report_wait_s (60.0) and "
        "rollout.rollout_timeout_s (3600.0) and weight_sync.timeout_s (300.0), or it ends work",
    ),
    ({"task": TOOLS}, "task.servers.s.call_timeout_s is 100.0: give less than rollout.step_timeo"),
    (
        {"task": MixtureTask(tasks={"one": GAME})},
        "task.tasks.one.connect_timeout_s is 60.0: give less than rollout.step_timeout_s (60.0)",
    ),
    # Placement and weight syncs.
    (
        {"evaluation.placement": "reserved", "generator.replicas": 1},
        "evaluation.placement is reserved: give at least 2 generator.replicas",
    ),
    (
        {"placement": "colocated", "evaluation.placement": "reserved"},
        "evaluation.placement is reserved: with placement colocated",
    ),
    (
        {"placement": "colocated", "weight_sync.transport": "rdma"},
        "weight_sync.transport is rdma: with placement colocated",
    ),
    (
        {"weight_sync.reset_prefix_cache_on_pull": False},
        "weight_sync.reset_prefix_cache_on_pull = False contradicts weight_sync.recompute",
    ),
    # Trap 24: each policy is corrected for exactly once.
    ({LOSS + "importance_weight": "token"}, LOSS + "importance_weight is token: with "),
    (
        {LOSS + "proximal_policy": "recomputed", LOSS + "importance_weight": "none"},
        LOSS + "proximal_policy is recomputed: without",
    ),
    (
        {LOSS + "proximal_policy": "interpolated", LOSS + "importance_weight": "token"},
        LOSS + "proximal_policy is interpolated: with schedule.staleness 0",
    ),
    (
        {
            LOSS + "proximal_policy": "recomputed",
            LOSS + "importance_weight": "token",
            LOSS + "ratio": "sequence",
        },
        LOSS + "ratio is sequence: with proximal_policy recomputed every ratio is 1",
    ),
    ({LOSS + "importance_weight_cap": 0.5}, LOSS + "importance_weight_cap is 0.5: give a finite"),
    ({LOSS + "mask_low": 1.5}, LOSS + "mask_low is 1.5: give a number between 0 and 1"),
    ({LOSS + "mask_high": 0.9}, LOSS + "mask_high is 0.9: give a finite number above 1"),
    ({LOSS + "aggregation": "constant"}, LOSS + "constant_length is 0: "),
    ({LOSS + "constant_length": 100}, LOSS + "constant_length is 100: "),
    ({"num_steps": 3, "profile.steps": (2, 4)}, "profile.steps has 4: the run has 3 steps"),
    (
        {"profile.steps": (1,), "profile.replicas": (0,), "mode": "train", "rollouts": Path("run")},
        "profile.replicas is (0,): this run has no replicas; leave it out",
    ),
    ({"profile.replicas": (0,)}, "profile.replicas is (0,): no step is profiled; give profile.st"),
    (
        {"profile.steps": (1,), "profile.replicas": (1, 2)},
        "profile.replicas has 2: the replicas are 0 to 1; give some of these",
    ),
    ({"profile.ranks": (1,)}, "profile.ranks is (1,): no step is profiled; give profile.steps"),
    ({"profile.steps": (1,), "profile.ranks": (0, 1)}, "profile.ranks has 1: the trainer's ranks"),
    ({"rollout.turn_discount": 0.9}, "rollout.turn_discount is 0.9: rollout.credit outcome does"),
    (
        {
            "rollout.credit": "turn",
            "rollout.final_reward_weight": 0.0,
            "rollout.overlong.buffer_tokens": 4,
        },
        "rollout.final_reward_weight is 0: the penalty",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda one: str(one)[:60])
def test_each_error_names_field_value_and_fix(
    config: RunConfig, changes: dict[str, Any], message: str
) -> None:
    (found,) = complaints(config, changes)
    assert found.startswith(message)


def test_all_errors_are_found_at_once(config: RunConfig) -> None:
    fields = {"num_steps": -1, "rollout.group_size": 1, "rollout.groups_per_step": 0, "seed": "x"}
    assert len(complaints(config, fields)) == 4
    related = {"rollout.step_timeout_s": 4000.0, "generator.heartbeat_s": 1000.0, "name": "a/b"}
    assert len(complaints(config, related)) == 3


def test_a_folder_that_holds_a_run_is_not_overwritten(config: RunConfig) -> None:
    config.run_dir.mkdir()
    (config.run_dir / "metrics.jsonl").touch()
    (message,) = complaints(config)
    assert "--checkpoint.resume" in message


def test_cuda_ranks_need_devices_of_their_own_and_colocated_ones_share_them(
    config: RunConfig,
) -> None:
    def found(devices: str, **changes: Any) -> list[str]:
        cuda = replace(LAPTOP, cuda_devices=tuple(devices.split()))
        return complaints(replace(config, **changes), machine=cuda)

    (message,) = found("0 1")
    assert message == (
        "generator.replicas is 2: replicas and trainer need 3 CUDA devices, and 2 are visible; "
        "give fewer, or let trainer and replicas share: --placement colocated"
    )
    (message,) = found("0")
    assert message.endswith("share: --placement colocated --generator.replicas 1")
    assert found("0", mode="generate")[0].endswith("and 1 is visible; give fewer")
    assert found("0 1", placement="colocated") == []
    assert found("MIG-a MIG-b MIG-c MIG-d") == []
    sharded = replace(config.trainer, data_parallel_shard=2)
    (message,) = found("MIG-a MIG-b MIG-c MIG-d", trainer=sharded)
    assert message.startswith("trainer.data_parallel_shard is 2: ranks that exchange data cannot")


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_a_machine_with_too_few_devices_is_told_all_options_that_it_needs(
    config: RunConfig, tmp_path: Path, num_devices: int
) -> None:
    given = ["--trainer.data-parallel-replicate=2", "--trainer.data-parallel-shard=2"]
    given.append(f"--output-dir={tmp_path}")
    file = tmp_path / "made.py"
    file.write_text("from torchtitan_rl.configs.alphabet_sort_tiny import config\n")
    machine = replace(LAPTOP, cuda_devices=tuple("0123"[:num_devices]))
    (message,) = complaints(load_config(file, given), machine=machine)
    options = message.partition("share: ")[2].split()
    hosts = made_up_hosts(f"1x{num_devices}")
    with pytest.raises(NoRoomError, match=" ".join(options)):
        place(load_config(file, given), hosts)
    told = load_config(file, [*given, *options])
    assert complaints(told, machine=machine) == []
    assert len(place(told, hosts).trainer_hosts) == told.trainer.world_size


def test_agents_need_room_at_the_endpoint_open_files_and_patience(tmp_path: Path) -> None:
    config = replace(AGENTS, output_dir=tmp_path)
    enough = {"endpoint.max_concurrent_requests": 256}  # 16 x 8 + 128
    files = replace(LAPTOP, max_open_files=1024)
    assert complaints(config, enough, files) == []
    (error,) = complaints(config, enough | {"schedule.max_overtaking_share": 1.0}, files)
    assert error.startswith("endpoint.max_concurrent_requests is 256: up to 384 agents")
    (error,) = complaints(config, enough, replace(LAPTOP, max_open_files=500))
    assert "a process may have 500; raise that (ulimit -n 768)" in error
    (error,) = complaints(config, enough | {"rollout.step_timeout_s": 900.0})
    assert error.startswith("endpoint.session_timeout_s is 600.0: give more than")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cpu_engine_takes_its_weights_twice_and_its_ranks_share_them(ranks: int) -> None:
    policy = replace(POLICY, num_bytes=1 << 30)  # 2 GiB in float32
    generator = GeneratorConfig(replicas=2, tensor_parallel=ranks, kv_cache_bytes=1 << 30)
    needed = 2 * (2 * (2 << 30) + ranks * ((1 << 30) + (1 << 30)))
    enough = replace(LAPTOP, memory_bytes=needed)
    assert serving_errors(generator, policy, enough, dtype="float32") == []
    too_small = replace(enough, memory_bytes=needed - 1)
    (error,) = serving_errors(generator, policy, too_small, dtype="float32")
    assert error.startswith("generator.replicas is 2: all processes need about ")


@pytest.mark.parametrize(
    ("shard", "tensor", "expert", "message"),
    [
        (1, 1, 1, ""),
        (2, 2, 2, ""),
        (2, 2, 4, ""),
        (32, 1, 8, ""),  # then ranks split the experts' hidden dimension
        (1, 2, 1, "trainer.expert_parallel is 1: give a divisor of trainer.data_parallel_shard x "),
        (2, 1, 4, "trainer.expert_parallel is 4: give a divisor of trainer.data_parallel_shard x "),
        (6, 1, 2, "trainer.expert_parallel is 2: the policy has 16 experts in each layer, which"),
        (3, 1, 3, "trainer.expert_parallel is 3: the policy has 16 experts in each layer, which"),
    ],
)
def test_ranks_that_cannot_hold_the_experts_are_refused(
    shard: int, tensor: int, expert: int, message: str
) -> None:
    trainer = TrainerConfig(
        data_parallel_shard=shard, tensor_parallel=tensor, expert_parallel=expert
    )
    moe = published_facts("Qwen3-30B-A3B")
    assert moe is not None
    assert moe.architecture is not None
    experts = Experts(number=16, per_token=4, has_normalized_weights=True)
    moe = replace(moe, architecture=replace(moe.architecture, experts=experts))
    found = expert_errors(trainer, moe, LoraConfig())
    assert [error[: len(message)] for error in found] == ([message] if message else [])
    (of_dense,) = expert_errors(replace(trainer, expert_parallel=2), POLICY, LoraConfig())
    assert of_dense == "trainer.expert_parallel is 2: the policy has no experts; give 1"
    (adapters,) = expert_errors(TrainerConfig(), moe, LoraConfig(rank=8))
    assert adapters.startswith("policy.lora.rank is 8: a policy with experts cannot get adapters")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.tensor_parallel": 2}, "trainer.expert_parallel is 1: give a divisor of "),
        ({"policy.lora.rank": 8}, "policy.lora.rank is 8: a policy with experts cannot"),
        (
            {"policy.lora.rank": 8, "policy.lora.target_modules": ("k_proj",)},
            "policy.lora.target_modules is k_proj: k_proj and v_proj have one configuration",
        ),
    ],
)
def test_fine_tuning_has_the_limits_of_policies_too(
    changes: dict[str, Any], message: str, config: RunConfig
) -> None:
    moe = published_facts("Qwen3-30B-A3B")
    task = SupervisedTask(data=ExamplesConfig(train=("a.jsonl",)))
    enough = replace(LAPTOP, num_cores=16, memory_bytes=4 << 40)
    found = find_errors(changed(replace(config, task=task), changes), moe, enough)
    assert any(error.startswith(message) for error in found)


@pytest.mark.parametrize(
    ("number", "replay", "message"),
    [
        (None, None, ""),
        (None, False, ""),
        (None, True, "rollout.replay_routing is on: the policy has no experts; leave it out"),
        (255, None, ""),
        (255, True, ""),
        (256, False, ""),
        (256, None, "rollout.replay_routing is on: the policy has 256 experts in each layer, "),
        (256, True, "rollout.replay_routing is on: the policy has 256 experts in each layer, "),
    ],
)
def test_routing_that_cannot_be_recorded_is_refused(
    number: int | None, replay: bool | None, message: str
) -> None:
    policy = published_facts("Qwen3-30B-A3B")
    assert policy is not None
    assert policy.architecture is not None
    experts = Experts(number=number, per_token=4, has_normalized_weights=True) if number else None
    policy = replace(policy, architecture=replace(policy.architecture, experts=experts))
    found = replay_errors(RolloutConfig(replay_routing=replay), policy, is_on_cuda=False)
    assert [error[: len(message)] for error in found] == ([message] if message else [])
    on_cuda = replay_errors(RolloutConfig(replay_routing=replay), policy, is_on_cuda=True)
    is_silent = number == 255 and replay
    assert bool(on_cuda) == bool(found or is_silent)


@pytest.mark.parametrize(
    ("free", "error", "note"),
    [
        ({SHM: 400, RUN: 0}, "", ""),
        (
            {SHM: 220, RUN: 220},
            "",
            "weights: /dev/shm has room for 2 of 3 versions of the weights, 100 MiB each; the "
            "others go to /runs/one",
        ),
        ({SHM: 64, RUN: 150}, "/dev/shm has 64 MiB free, /runs/one has 150 MiB free", ""),
    ],
)
def test_published_weights_go_to_shared_memory_then_to_the_run_or_are_refused(
    free: dict[Path, int], error: str, note: str
) -> None:
    found, said = weight_room(
        num_versions=3,
        num_bytes=100 * MIB,
        free={place: size * MIB for place, size in free.items()},
        root=SHM,
    )
    assert said == note
    assert error in found
    assert bool(found) == bool(error)


def test_servers_of_all_rollouts_that_may_not_start_within_a_step_are_warned_of() -> None:
    def notes(*servers: McpServer, num_rollouts: int = 9) -> list[str]:
        named = {f"s{number}": server for number, server in enumerate(servers)}
        return start_notes(
            MixtureTask(tasks={"one": McpTask(train=("a",), servers=named)}),
            step_timeout_s=60.0,
            num_rollouts=num_rollouts,
            num_cores=2,
        )

    one = McpServer(command=("true",), start_timeout_s=20.0)
    assert notes(one, num_rollouts=12) == []  # 4 at a time, so three rounds of at most 20 s
    (note,) = notes(one, num_rollouts=13)
    assert note.startswith("warning: task.tasks.one.servers: 13 rollouts at once start 13 servers")
    assert len(notes(one, one)) == 1  # 18 servers
    others = replace(one, shared=True), McpServer(url="http://a", start_timeout_s=20.0)
    assert notes(one, *others) == []


@pytest.mark.parametrize(
    ("limit", "num_cores"), [("150000 100000", 2), ("max 100000", 64), ("-1 100000", 64)]
)
def test_a_containers_cpu_limit_bounds_the_number_of_cores(
    limit: str, num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(f"{limit}\n")
    monkeypatch.setattr(machine, "_CGROUP_CORES", ((str(file),),))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    here = machine_facts()
    assert here.num_cores == num_cores
    assert here.memory_bytes > 1 << 28


@pytest.mark.parametrize(
    ("url", "is_base"),
    [
        ("http://host:8000/v1", True),
        ("https://host/a/v1/", True),
        ("http://[::1]:80/v1", True),
        ("host:8000/v1", False),
        ("http:///v1", False),
        ("http://host/v1?key=x", False),
        ("http://host/v1#x", False),
        ("http://ho st/v1", False),
        ("http://host\\v1", False),
        ("http://host:99999/v1", False),
        ("http://[::1/v1", False),
    ],
)
def test_the_engines_of_a_server_are_named_by_a_plain_url(
    config: RunConfig, url: str, is_base: bool
) -> None:
    lora = {"policy.lora": LoraConfig(rank=4), "generator.replicas": 1}
    found = complaints(config, {**lora, "generator.endpoint": url})
    assert any("give a URL such as" in one for one in found) is not is_base


@pytest.mark.parametrize(
    "login", ["http://user:s3cret@", "https://s3cret@", "http://u:/s3cret#@", "user:s3cret@"]
)
def test_no_url_has_a_password(config: RunConfig, login: str) -> None:
    url = f"{login}host/v1"
    for changes, field, fix in (
        ({"teacher.url": url}, "teacher.url", "TORCHTITAN_RL_TEACHER_KEY"),
        ({"teacher.checkpoint": url}, "teacher.checkpoint", "TORCHTITAN_RL_TEACHER_KEY"),
        ({"teacher.by_task": {"a": url}}, "teacher.by_task", "TORCHTITAN_RL_TEACHER_KEY"),
        ({"generator.endpoint": url}, "generator.endpoint", "TORCHTITAN_RL_GENERATOR_KEY"),
        ({"task": replace(GAME, url=url)}, "task.url", "headers"),
        (
            {"task": McpTask(train=("a",), servers={"s": McpServer(url=url)})},
            "task.servers.s.url",
            "headers",
        ),
        (
            {
                "task": MixtureTask(
                    tasks={"one": JudgedTask(task=GAME, judge=JudgeConfig(base_url=url))}
                )
            },
            "task.tasks.one.judge.base_url",
            "api_key_env",
        ),
    ):
        (found,) = complaints(config, changes)
        assert found.startswith(f"{field} is ")
        assert "leave user and password out of the URL" in found
        assert fix in found
        assert "s3cret" not in found
    errors = str(SearchR1Task(retriever=url).errors())
    assert "task.retriever is a URL with '@': leave user and password out" in errors
    assert "s3cret" not in errors


def test_an_at_sign_in_a_path_is_no_password(config: RunConfig) -> None:
    for url in ("https://host/@user/mcp", "http://host:8000/@user/mcp", "http://[fe80::1]:80/a@b"):
        assert field_errors(McpServer(url=url)) == {}
