"""What the processes of a run and of a server are built from, and what is closed."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_rl.backends.monarch import run
from torchtitan_rl.backends.monarch.run import _endpoint_spec, _generator_spec, _trainer_spec
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.config.serve import ServeConfig, prepare_serve
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import TrainerLostError
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.training.config import ProfileConfig
from torchtitan_rl.weights.config import WeightSyncConfig

MACHINE = HostFacts(num_cores=16, memory_bytes=64 << 30)
SYNC = WeightSyncConfig(mode="drain")
ENDPOINT = EndpointConfig(enabled=True, port=0, stream_interval_s=0.5, reasoning_parser="qwen3")


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_runs_processes_get_its_sections_and_seeds_of_their_own(
    tmp_path: Path, placement: str
) -> None:
    config = replace(
        TINY, output_dir=tmp_path, seed=7, placement=placement, weight_sync=SYNC, endpoint=ENDPOINT
    )
    config = replace(config, policy=replace(config.policy, dtype="float32"))
    prepared = prepare_run(config, MACHINE)
    replicas = [
        _generator_spec(prepared, group, trace_dir=tmp_path) for group in prepared.plan.replicas
    ]
    assert [spec.name for spec in replicas] == ["replica0", "replica1"]
    assert len({spec.seed for spec in replicas}) == 2
    for spec in replicas:
        assert (spec.generator, spec.weight_sync) == (config.generator, SYNC)
        assert (spec.dtype, spec.sleeps) == ("float32", placement == "colocated")
        assert (spec.stream_interval_s, spec.reasoning_parser) == (0.5, "qwen3")
        assert (spec.log_dir, spec.trace_dir) == (config.log_dir.absolute(), tmp_path)
    trainer = _trainer_spec(prepared, tmp_path)
    assert (trainer.seed, trainer.dtype, trainer.num_steps) == (7, "float32", config.num_steps)
    endpoint = _endpoint_spec(prepared)
    assert (endpoint.generation_config, endpoint.dtype) == ("vllm", "float32")
    assert endpoint.max_model_len == config.generator.max_model_len


def test_all_processes_of_a_run_are_told_the_planned_device(tmp_path: Path) -> None:
    cuda = replace(MACHINE, cuda_devices=("0", "1", "2"))
    for device, machine in (("cpu", MACHINE), ("cuda", cuda)):
        prepared = prepare_run(replace(TINY, output_dir=tmp_path), machine)
        replica = _generator_spec(prepared, prepared.plan.replicas[0])
        specs = [_trainer_spec(prepared, None), replica, _endpoint_spec(prepared)]
        assert {spec.device for spec in specs} == {device}


def test_no_process_of_a_run_needs_the_tasks_module(tmp_path: Path) -> None:
    """It need not be on other hosts, then: what they unpickle has no part of it."""
    prepared = prepare_run(replace(TINY, output_dir=tmp_path), MACHINE)
    specs = [_trainer_spec(prepared, None), _generator_spec(prepared, prepared.plan.replicas[0])]
    module = type(TINY.task).__module__.encode()
    assert module in pickle.dumps(TINY)
    assert all(module not in pickle.dumps(spec) for spec in specs)


def test_what_is_served_samples_as_its_checkpoint_says_and_has_no_weights_to_sync(
    tmp_path: Path,
) -> None:
    config = ServeConfig(
        model=TINY.policy.checkpoint, dtype="float32", endpoint=ENDPOINT, log_dir=tmp_path
    )
    prepared = prepare_serve(config)
    spec = _generator_spec(prepared, prepared.plan.replicas[1])
    assert (spec.name, spec.dtype, spec.weight_sync) == ("replica1", "float32", WeightSyncConfig())
    assert (spec.sleeps, spec.trace_dir, spec.stream_interval_s) == (False, None, 0.5)
    endpoint = _endpoint_spec(prepared)
    assert (endpoint.generation_config, endpoint.dtype) == ("auto", "float32")


def test_chosen_replicas_profile_the_versions_that_chosen_steps_begin_with(tmp_path: Path) -> None:
    profile = ProfileConfig(steps=(1, 5), replicas=(1,))
    prepared = prepare_run(replace(TINY, output_dir=tmp_path, profile=profile), MACHINE)
    specs = [_generator_spec(prepared, group) for group in prepared.plan.replicas]
    assert [spec.profiled_versions for spec in specs] == [(), (0, 4)]
    assert specs[1].profile_dir == prepared.config.run_dir / "profile"


def test_a_trainer_that_does_not_start_again_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other ranks would hold the device that the next one needs."""
    calls: list[str] = []

    class Trainer:
        async def start(self, transport: object) -> None:
            raise TrainerLostError("killed")

        def lose(self, cause: BaseException) -> None:
            calls.append("lose")

        async def close(self) -> None:
            calls.append("close")

    async def spawn(*given: object) -> Trainer:
        return Trainer()

    monkeypatch.setattr(run.MonarchTrainer, "spawn", spawn)
    monkeypatch.setattr(run, "_trainer_spec", lambda *given: None)
    group = ProcessGroup(name="trainer", ranks=2, threads=1)
    processes: Any = SimpleNamespace(
        prepared=SimpleNamespace(plan=SimpleNamespace(trainer=group)), trainers=[]
    )
    processes.trace_dir = processes.hosts = processes.transport = None
    with pytest.raises(TrainerLostError):
        asyncio.run(run.RunProcesses.restart_trainer(processes, "trainer-2"))
    assert calls == ["lose", "close"]
