from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.config_mutations import with_value
from torchtitan_rl.config.checks import machine
from torchtitan_rl.config.checks.machine import (
    MachineFacts,
    machine_facts,
    max_rollouts,
    num_published_versions,
    serving_errors,
    weight_room,
)
from torchtitan_rl.config.checks.run import find_errors
from torchtitan_rl.config.hf_model import PolicyFacts
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.configs.calculator_agent_tiny import config as AGENTS
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.rollout.task import Task

POLICY = PolicyFacts(
    num_heads=4,
    num_kv_heads=2,
    max_positions=1024,
    vocab_size=100,
    num_bytes=2 << 20,
    kv_values_per_token=512,
)
LAPTOP = MachineFacts(num_cores=2, memory_bytes=24 << 30)
SHM, RUN = Path("/dev/shm"), Path("/runs/one")
MIB = 1 << 20


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(policy=PolicyConfig(checkpoint="x"), task=Task(), output_dir=tmp_path)


def changed(config: RunConfig, **changes: object) -> RunConfig:
    for name, value in changes.items():
        config = with_value(config, name.replace("__", "."), value)
    return config


@pytest.mark.parametrize(
    ("limit", "num_cores"), [("150000 100000", 2), ("max 100000", 64), ("-1 100000", 64)]
)
def test_a_containers_cpu_limit_counts_as_so_many_cores(
    limit: str, num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(f"{limit}\n")
    monkeypatch.setattr(machine, "_CGROUP_CPU", ((str(file),),))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    assert machine_facts().num_cores == num_cores


def test_more_threads_than_four_a_core_are_refused(config: RunConfig) -> None:
    seven = changed(config, trainer__data_parallel_shard=7)
    (error,) = find_errors(seven, POLICY, LAPTOP)
    assert error.startswith("trainer.data_parallel_shard is 7: replicas and trainer compute in 16 ")
    assert find_errors(seven, POLICY, replace(LAPTOP, num_cores=4)) == []
    one_core = replace(LAPTOP, num_cores=1)
    assert find_errors(config, POLICY, one_core) == []


def test_a_kv_cache_that_cannot_hold_one_request_is_refused(config: RunConfig) -> None:
    # 512 tokens and vLLM's own block of 32, 512 values each, in float32
    needed = (512 + 32) * 512 * 4
    (error,) = find_errors(changed(config, generator__kv_cache_bytes=10), POLICY, LAPTOP)
    assert error.startswith(
        "generator.kv_cache_bytes is 10: one request of generator.max_model_len"
    )
    assert str(needed) in error
    enough = changed(config, generator__kv_cache_bytes=needed)
    assert find_errors(enough, POLICY, LAPTOP) == []
    halves = changed(enough, generator__kv_cache_bytes=needed // 2, generator__tensor_parallel=2)
    assert find_errors(halves, POLICY, replace(LAPTOP, num_cores=8)) == []


def test_more_requests_than_a_step_has_tokens_are_refused(config: RunConfig) -> None:
    (error,) = find_errors(changed(config, generator__max_running_requests=5000), POLICY, LAPTOP)
    assert error.startswith(
        "generator.max_running_requests is 5000: a step of an engine takes 4096"
    )


@pytest.mark.parametrize(
    ("staleness", "window", "groups"),
    [(0, 0.0, 16), (0, 1.0, 32), (0, 0.5, 24), (2, 0.0, 48), (2, 1.0, 32)],
)
def test_rollouts_at_once_are_those_of_the_buffer_and_of_a_evaluation(
    config: RunConfig, staleness: int, window: float, groups: int
) -> None:
    config = changed(config, schedule__staleness=staleness, schedule__window=window)
    assert max_rollouts(config) == groups * 8 + 64


def test_a_window_at_staleness_0_needs_more_places_for_agents(tmp_path: Path) -> None:
    config = replace(AGENTS, output_dir=tmp_path)
    enough = changed(config, endpoint__max_concurrent_requests=256)  # 16 x 8 + 128
    assert find_errors(enough, POLICY, LAPTOP) == []
    (error,) = find_errors(changed(enough, schedule__window=1.0), POLICY, LAPTOP)
    assert error.startswith("endpoint.max_concurrent_requests is 256: up to 384 agents")


def test_agents_need_open_files(tmp_path: Path) -> None:
    config = replace(AGENTS, output_dir=tmp_path)
    assert find_errors(config, POLICY, replace(LAPTOP, max_open_files=1024)) == []
    (error,) = find_errors(config, POLICY, replace(LAPTOP, max_open_files=500))
    assert "a process may have 500; raise that (ulimit -n 768)" in error


def test_weights_stored_in_float32_are_not_counted_twice(config: RunConfig) -> None:
    assert replace(POLICY, bytes_per_weight=4).num_bytes_as("float32") == POLICY.num_bytes
    assert POLICY.num_bytes_as("float32") == 2 * POLICY.num_bytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cpu_engine_takes_its_weights_twice_and_its_ranks_share_them(ranks: int) -> None:
    policy = replace(POLICY, num_bytes=1 << 30)  # 2 GiB in float32
    generator = GeneratorConfig(replicas=2, tensor_parallel=ranks, kv_cache_bytes=1 << 30)
    needed = 2 * (2 * (2 << 30) + ranks * ((1 << 30) + (1 << 30)))
    enough = replace(LAPTOP, memory_bytes=needed)
    assert serving_errors(generator, policy, enough) == []
    (error,) = serving_errors(generator, policy, replace(enough, memory_bytes=needed - 1))
    assert error.startswith("generator.replicas is 2: all processes need about ")


def test_a_evaluation_keeps_versions_for_as_long_as_the_cap_lets_it(config: RunConfig) -> None:
    asynchronous = changed(config, schedule__staleness=2)
    assert num_published_versions(asynchronous) == 5
    assert num_published_versions(changed(asynchronous, evaluation__num_problems=0)) == 3


def test_published_weights_go_to_shared_memory_where_all_versions_fit() -> None:
    room = weight_room(num_versions=3, num_bytes=100 * MIB, free={SHM: 400 * MIB, RUN: 0}, root=SHM)
    assert (room.error, room.note) == ("", "")


def test_versions_that_do_not_fit_go_to_the_runs_folder_and_the_user_is_told() -> None:
    room = weight_room(
        num_versions=3, num_bytes=100 * MIB, free={SHM: 220 * MIB, RUN: 220 * MIB}, root=SHM
    )
    assert room.error == ""
    assert room.note == (
        "weights: /dev/shm has room for 2 of 3 versions of the weights, 100 MiB each; the others "
        "go to /runs/one"
    )


def test_versions_that_fit_nowhere_are_refused_before_the_run() -> None:
    free = {SHM: 64 * MIB, RUN: 150 * MIB}
    room = weight_room(num_versions=3, num_bytes=100 * MIB, free=free, root=SHM)
    assert room.error.startswith("weight_sync.transport is shared_memory or auto: there is no room")
    assert "/dev/shm has 64 MiB free, /runs/one has 150 MiB free" in room.error


def test_ranks_that_exchange_data_cannot_have_mig_instances(config: RunConfig) -> None:
    machine = replace(LAPTOP, cuda_devices=("MIG-a", "MIG-b", "MIG-c", "MIG-d"))
    assert find_errors(config, POLICY, machine) == []
    errors = find_errors(changed(config, trainer__data_parallel_shard=2), POLICY, machine)
    assert [one.split(":")[0] for one in errors] == ["trainer.data_parallel_shard is 2"]


def test_this_machine_has_cores_memory_and_files() -> None:
    here = machine_facts()
    assert here.num_cores >= 1
    assert here.memory_bytes > 1 << 28
    assert here.max_open_files is None or here.max_open_files > 16
