from __future__ import annotations

import json
from dataclasses import replace

import pytest

from torchtitan_rl.config.checks.machine import MachineFacts
from torchtitan_rl.config.checks.run import find_errors
from torchtitan_rl.config.hf_model import PolicyFacts, read_policy_facts
from torchtitan_rl.config.plan import plan_processes
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.orchestration.config import EvaluationConfig, ScheduleConfig
from torchtitan_rl.rollout.config import RolloutConfig, SamplingConfig
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.training.config import LossConfig, TrainerConfig
from torchtitan_rl.weights.config import WeightSyncConfig

POLICY = PolicyFacts(
    num_heads=9, num_kv_heads=3, max_positions=1024, vocab_size=100, num_bytes=2 << 20
)
LAPTOP = MachineFacts(num_cores=2, memory_bytes=24 << 30)


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return RunConfig(policy=PolicyConfig(checkpoint="x"), task=Task(), output_dir=tmp_path)


def test_the_defaults_have_no_error(config):
    assert find_errors(config, POLICY, LAPTOP) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rollout": RolloutConfig(group_size=1)}, "rollout.group_size is 1"),
        (
            {
                "rollout": RolloutConfig(max_total_tokens=600),
                "trainer": TrainerConfig(row_len=600),
            },
            "rollout.max_total_tokens is 600",
        ),
        (
            {
                "rollout": RolloutConfig(max_total_tokens=600),
                "generator": GeneratorConfig(max_model_len=600),
            },
            "trainer.row_len is 512",
        ),
        ({"generator": GeneratorConfig(max_model_len=2048)}, "generator.max_model_len is 2048"),
        ({"generator": GeneratorConfig(tensor_parallel=2)}, "generator.tensor_parallel is 2"),
        ({"trainer": TrainerConfig(tensor_parallel=4, threads=1)}, "trainer.tensor_parallel is 4"),
        ({"generator": GeneratorConfig(replicas=0)}, "generator.replicas is 0"),
        (
            {"generator": GeneratorConfig(kv_cache_bytes=16 << 30)},
            "generator.kv_cache_bytes is 17179869184: all processes need about",
        ),
        ({"evaluation": EvaluationConfig(temperature=-1.0)}, "evaluation.temperature is -1.0"),
        ({"schedule": ScheduleConfig(staleness=-1)}, "schedule.staleness is -1"),
        ({"schedule": ScheduleConfig(staleness=1, window=0.7)}, "schedule.window is 0.7"),
        ({"schedule": ScheduleConfig(max_wait_s=10.0)}, "schedule.max_wait_s is 10.0"),
        (
            {
                "evaluation": EvaluationConfig(placement="reserved"),
                "generator": GeneratorConfig(replicas=1),
            },
            "evaluation.placement is reserved",
        ),
        (
            {
                "placement": "colocated",
                "evaluation": EvaluationConfig(placement="reserved"),
            },
            "evaluation.placement is reserved: with placement colocated",
        ),
        (
            {"placement": "colocated", "weight_sync": WeightSyncConfig(transport="rdma")},
            "weight_sync.transport is rdma: with placement colocated",
        ),
        (
            {"trainer": TrainerConfig(loss=LossConfig(importance_weight="token"))},
            "trainer.loss.importance_weight is token",
        ),
        (
            {"weight_sync": WeightSyncConfig(reset_prefix_cache_on_pull=False)},
            "weight_sync.reset_prefix_cache_on_pull = False contradicts weight_sync.recompute",
        ),
        (
            {
                "weight_sync": WeightSyncConfig(
                    mode="drain",
                    reset_prefix_cache_on_pull=False,
                    recompute_running_on_pull=False,
                )
            },
            'weight_sync.reset_prefix_cache_on_pull = False contradicts weight_sync.mode = "drain"',
        ),
    ],
)
def test_each_error_names_its_field_and_value(config, changes, field):
    (message,) = find_errors(replace(config, **changes), POLICY, LAPTOP)
    assert message.startswith(field)


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"top_k": -1}, {"min_p": 1.0}])
def test_sampling_may_cut_some_tokens_and_not_all(config, wrong):
    right = RolloutConfig(sampling=SamplingConfig(top_p=0.9, top_k=20, min_p=0.1))
    assert find_errors(replace(config, rollout=right), POLICY, LAPTOP) == []
    rollout = RolloutConfig(sampling=SamplingConfig(**wrong))
    (message,) = find_errors(replace(config, rollout=rollout), POLICY, LAPTOP)
    assert message.startswith(f"rollout.sampling.{next(iter(wrong))} is")


def test_all_errors_are_found_at_once(config):
    wrong = replace(
        config, num_steps=-1, rollout=RolloutConfig(group_size=1, groups_per_step=0, max_turns=0)
    )
    assert len(find_errors(wrong, POLICY, LAPTOP)) == 4


def test_too_few_cuda_devices_are_reported_with_the_number_needed(config):
    machine = replace(LAPTOP, cuda_devices=("0", "1"))
    (message,) = find_errors(config, POLICY, machine)
    assert message.startswith(
        "generator.replicas is 2: replicas and trainer need 3 CUDA devices, and 2 "
    )
    (message,) = find_errors(config, POLICY, replace(LAPTOP, cuda_devices=("0",)))
    assert message.endswith("need 3 CUDA devices, and 1 is visible; give fewer")


def test_a_directory_that_holds_a_run_is_not_overwritten(config):
    config.run_dir.mkdir()
    (config.run_dir / "metrics.jsonl").touch()
    (message,) = find_errors(config, POLICY, LAPTOP)
    assert "--checkpoint.resume" in message


def test_policy_facts_come_from_the_checkpoint(tmp_path):
    hf = {"num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match="safetensors"):
        read_policy_facts(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(ValueError, match="tokenizer"):
        read_policy_facts(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    facts = read_policy_facts(tmp_path)
    assert facts == PolicyFacts(
        num_heads=4, num_kv_heads=4, max_positions=64, vocab_size=11, num_bytes=5
    )


def test_on_cuda_each_rank_has_a_device_of_its_own(config):
    config = replace(
        config,
        generator=GeneratorConfig(replicas=2, tensor_parallel=2),
        trainer=TrainerConfig(data_parallel_shard=2),
    )
    plan = plan_processes(config, devices="456789")
    devices = [group.devices for group in (*plan.replicas, plan.trainer)]
    assert devices == [("4", "5"), ("6", "7"), ("8", "9")]


def test_colocated_replicas_and_trainer_share_devices_and_cores(config):
    colocated = replace(
        config,
        placement="colocated",
        pin_cores=True,
        generator=GeneratorConfig(replicas=2, tensor_parallel=2),
        trainer=TrainerConfig(data_parallel_shard=2, threads=1),
    )
    plan = plan_processes(colocated, devices="0123", cores=range(8))
    assert [group.devices for group in plan.replicas] == [("0", "1"), ("2", "3")]
    assert plan.trainer.devices == ("0", "1")
    assert "colocated" in plan.describe()
    on_cpu = plan_processes(colocated, cores=range(5))
    assert [group.cores for group in on_cpu.replicas] == [(0, 1), (2, 3)]
    assert on_cpu.trainer.cores == (0, 1)


def test_a_colocated_run_needs_as_many_devices_and_cores_as_its_larger_part(config):
    config = replace(config, pin_cores=True, trainer=TrainerConfig(data_parallel_shard=2))
    machine = replace(LAPTOP, cuda_devices=("0", "1"))
    assert len(find_errors(config, POLICY, machine)) == 1
    assert len(find_errors(config, POLICY, replace(LAPTOP, num_cores=4))) == 1
    colocated = replace(config, placement="colocated")
    assert find_errors(colocated, POLICY, machine) == []
    assert find_errors(colocated, POLICY, replace(LAPTOP, num_cores=4)) == []


def test_replicas_have_different_engine_seeds(config):
    plan = plan_processes(config)
    assert len({replica.seed for replica in plan.replicas}) == 2
    assert all(replica.devices == () for replica in plan.replicas)


def test_pinned_processes_get_cores_of_their_own_and_the_controller_stays_off_the_trainers(
    config,
):
    config = replace(config, pin_cores=True, generator=GeneratorConfig(replicas=2))
    plan = plan_processes(config, cores=[0, 1, 2, 3, 4])
    assert [group.cores for group in plan.replicas] == [(0,), (1,)]
    assert plan.trainer.cores == (2, 3)
    assert plan.controller_cores == (0, 1, 4)
    unpinned = plan_processes(replace(config, pin_cores=False), cores=[0, 1])
    assert unpinned.trainer.cores == unpinned.controller_cores == ()


def test_pinning_more_threads_than_there_are_cores_is_refused(config):
    config = replace(config, pin_cores=True, generator=GeneratorConfig(replicas=2))
    assert any(line.startswith("pin_cores") for line in find_errors(config, POLICY, LAPTOP))
