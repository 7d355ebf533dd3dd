"""Where replicas go that are added to a running run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_rl.config import scaling
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.memory import MemoryPlan
from torchtitan_rl.config.plan import plan_on_hosts, plan_processes
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.scaling import plan_replicas
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.serving.config import Keys


def run_of(replicas: int, parallel: int = 1, **changes: Any) -> RunConfig:
    generator = replace(TINY.generator, replicas=replicas, tensor_parallel=parallel)
    return replace(TINY, generator=generator, **changes)


def prepared(config: RunConfig, plan: Any, memory: MemoryPlan | None = None) -> PreparedRun:
    return PreparedRun(config=config, policy_dir=Path(), plan=plan, keys=Keys(), memory=memory)


def host(devices: Sequence[str] = (), *, num_cores: int = 8, gib: int = 64) -> HostFacts:
    return HostFacts(
        address="", cuda_devices=tuple(devices), num_cores=num_cores, memory_bytes=gib << 30
    )


def test_replicas_get_devices_that_no_process_has_and_otherwise_there_is_one_error(monkeypatch):
    config, devices = run_of(1), ("4", "5", "6", "7")
    facts = HostFacts(cuda_devices=devices, num_cores=8, memory_bytes=1 << 40)
    monkeypatch.setattr(scaling, "machine_facts", lambda: facts)
    run = prepared(config, plan_processes(config, devices=devices, cores=range(8)))
    assert run.plan.trainer is not None
    assert run.plan.trainer.devices == ("5",)
    more = plan_replicas(run, run.plan.replicas, range(1, 3))
    assert [(one.name, one.devices) for one in more] == [("replica1", ("6",)), ("replica2", ("7",))]
    assert len({one.seed for one in (*run.plan.replicas, *more)}) == 3
    with pytest.raises(ConfigError) as raised:
        plan_replicas(run, run.plan.replicas, range(1, 4))
    assert str(raised.value) == (
        "no free device: a replica needs 1, and 0 are free; with those that run, there is room for "
        "--replicas 3"
    )
    # What one that left had is free again.
    (again,) = plan_replicas(run, [run.plan.replicas[0], more[1]], [3])
    assert (again.name, again.devices) == ("replica3", ("6",))


def test_a_replica_with_several_ranks_needs_them_on_one_host_that_gets_weights():
    config = run_of(2, parallel=2)
    hosts = [host("0123"), host("01"), host("01")]
    run = prepared(config, plan_on_hosts(config, hosts))
    assert [one.host for one in run.plan.replicas] == [0, 0]
    with pytest.raises(ConfigError, match="host0: no free device: a replica needs 2, and 0 are"):
        plan_replicas(run, run.plan.replicas, [2])
    (one,) = plan_replicas(run, run.plan.replicas[:1], [2])
    assert (one.host, one.devices) == (0, ("2", "3"))


def test_on_a_cpu_cores_threads_and_memory_limit_the_number(monkeypatch):
    config = run_of(1)
    facts = HostFacts(num_cores=2, memory_bytes=10 << 30)
    monkeypatch.setattr(scaling, "machine_facts", lambda: facts)
    run = prepared(config, plan_processes(config, cores=range(2)))
    assert [one.name for one in plan_replicas(run, run.plan.replicas, range(1, 4))][
        -1
    ] == "replica3"
    with pytest.raises(ConfigError, match="no free core: 9 threads are more than 4 for each of 2"):
        plan_replicas(run, run.plan.replicas, range(1, 50))
    memory = MemoryPlan(
        trainer={"all": 4 << 30}, replica={"all": 2 << 30}, host={}, teacher={}, kv_tokens=0
    )
    with pytest.raises(ConfigError, match=r"no free memory: .* 12 GiB, .* 10 GiB; .*--replicas 3"):
        plan_replicas(replace(run, memory=memory), run.plan.replicas, range(1, 4))


def test_with_pinned_cores_a_replica_needs_cores_of_its_own(monkeypatch):
    trainer = replace(TINY.trainer, threads=1, data_parallel_shard=1)
    config = run_of(1, pin_cores=True, trainer=trainer)
    facts = HostFacts(num_cores=4, memory_bytes=1 << 40)
    monkeypatch.setattr(scaling, "machine_facts", lambda: facts)
    # The controller, which plans, may not use the trainer's cores.
    monkeypatch.setattr(scaling.os, "sched_getaffinity", lambda pid: {0, 2, 3})
    run = prepared(config, plan_processes(config, cores=range(4)))
    more = plan_replicas(run, run.plan.replicas, range(1, 3))
    assert [one.cores for one in more] == [(2,), (3,)]
    with pytest.raises(ConfigError, match=r"no free core: a replica needs 1 \(pin_cores\), and 0"):
        plan_replicas(run, run.plan.replicas, range(1, 4))
