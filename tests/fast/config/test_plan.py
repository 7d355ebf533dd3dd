"""Which host each replica and trainer rank is on, and what a plan over hosts says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl import GeneratorConfig, ScheduleConfig, TrainerConfig
from torchtitan_rl.backends.monarch.runtime import process_environment
from torchtitan_rl.config.machine import (
    HostFacts,
    NoRoomError,
    Placement,
    made_up_hosts,
    place,
    visible_devices,
)
from torchtitan_rl.config.plan import plan_on_hosts, plan_processes
from torchtitan_rl.config.run import LaunchConfig, PolicyConfig, RunConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.rollout.task import Task


def run_of(
    replicas: int,
    tensor_parallel: int,
    shards: int,
    *,
    trainer_parallel: int = 1,
    placement: Any = "separate",
    **launch: Any,
) -> RunConfig:
    return replace(
        TINY,
        placement=placement,
        generator=replace(TINY.generator, replicas=replicas, tensor_parallel=tensor_parallel),
        trainer=replace(TINY.trainer, data_parallel_shard=shards, tensor_parallel=trainer_parallel),
        launch=LaunchConfig(**launch),
    )


def hosts_with(*devices: int) -> tuple[HostFacts, ...]:
    return tuple(
        HostFacts(
            address="",
            cuda_devices=tuple(map(str, range(number))),
            num_cores=8,
            memory_bytes=1 << 40,
        )
        for number in devices
    )


@pytest.mark.parametrize(
    ("config", "hosts", "replica_hosts", "trainer_hosts"),
    [
        (run_of(2, 1, 4), "2x8", [0, 0], [1] * 4),
        (run_of(8, 2, 16), "4x8", [0] * 4 + [1] * 4, [2] * 8 + [3] * 8),
        (run_of(2, 2, 12), "2x8", [0, 0], [0] * 4 + [1] * 8),  # shared: there is no other room
        (run_of(1, 1, 1), "1x2", [0], [0]),
        (run_of(4, 2, 8), "2x8", [0] * 4, [1] * 8),
        (run_of(16, 1, 16, placement="colocated"), "2x8", [0] * 8 + [1] * 8, [0] * 8 + [1] * 8),
        (run_of(2, 1, 1), "2x0", [0, 0], [1]),
        (run_of(3, 1, 1), "3x0", [0, 0, 1], [2]),
        (run_of(2, 1, 2), "4x0", [0, 1], [3, 3]),
        (run_of(1, 1, 2, trainer_hosts=(0, 1)), "2x0", [0], [0, 1]),
        (run_of(2, 1, 1, trainer_hosts=(0,)), "2x0", [1, 1], [0]),
        (run_of(2, 1, 1, generator_hosts=(1,)), "2x0", [1, 1], [0]),
        (run_of(2, 1, 1, generator_hosts=(0,), trainer_hosts=(0,)), "2x0", [0, 0], [0]),
        (run_of(2, 1, 2, generator_hosts=(1, 0)), "2x4", [0, 0], [1, 1]),
        (run_of(2, 1, 1, generator_hosts=(0, 1)), "3x2", [0, 1], [2]),
        (run_of(5, 1, 3, generator_hosts=(0, 1)), "2x4", [0] * 4 + [1], [1] * 3),
        (run_of(1, 1, 2, trainer_parallel=2, trainer_hosts=(0, 1)), "2x0", [0], [0, 0, 1, 1]),
    ],
)
def test_trainer_and_replicas_are_apart_while_there_is_room_and_where_they_are_told_to_be(
    config: RunConfig, hosts: str, replica_hosts: list[int], trainer_hosts: list[int]
) -> None:
    assert place(config, made_up_hosts(hosts)) == Placement(
        replica_hosts=tuple(replica_hosts), trainer_hosts=tuple(trainer_hosts)
    )


@pytest.mark.parametrize(
    ("chosen", "hosts", "replica_hosts", "trainer_hosts"),
    [
        ({"generator_hosts": (1,)}, "2x4", [1] * 4, [1] * 4),
        ({"trainer_hosts": (1,)}, "2x4", [1] * 4, [1] * 4),
        ({"trainer_hosts": (1,)}, "3x2", None, None),
        ({"trainer_hosts": (1, 2)}, "3x2", [1, 1, 2, 2], [1, 1, 2, 2]),
        ({"generator_hosts": (1, 2), "trainer_hosts": (2, 0)}, "3x2", [2, 2, 1, 1], [2, 2, 0, 0]),
        ({"generator_hosts": (0, 1)}, "2x4", [0] * 4, [0] * 4),
        ({"generator_hosts": (1,)}, "2x0", [1] * 4, [1] * 4),
        ({"trainer_hosts": (1,)}, "2x0", [1] * 4, [1] * 4),
        ({}, "2x0", [0, 0, 1, 1], [0] * 4),
    ],
)
def test_a_colocated_run_is_together_on_the_hosts_chosen_for_either_part(
    chosen: dict[str, Any], hosts: str, replica_hosts: list[int] | None, trainer_hosts: list[int]
) -> None:
    config = run_of(4, 1, 4, placement="colocated", **chosen)
    if replica_hosts is None:
        with pytest.raises(NoRoomError, match="the host, with 2 CUDA devices, has no room"):
            place(config, made_up_hosts(hosts))
        return
    assert place(config, made_up_hosts(hosts)) == Placement(
        replica_hosts=tuple(replica_hosts), trainer_hosts=tuple(trainer_hosts)
    )


@pytest.mark.parametrize("devices", [(3, 3), (5, 2), (0, 1, 2, 3)])
def test_tensor_parallel_trainer_ranks_are_on_one_host(devices: tuple[int, ...]) -> None:
    ranks = place(run_of(1, 1, 2, trainer_parallel=2), hosts_with(*devices)).trainer_hosts
    assert len(ranks) == 4
    assert ranks[::2] == ranks[1::2]


@pytest.mark.parametrize(
    ("config", "hosts", "message"),
    [
        (run_of(1, 16, 1), "2x8", "generator.tensor_parallel is 16: the ranks of a replica"),
        (run_of(3, 8, 8), "2x8", "generator.replicas is 3: the hosts, with 8+8 CUDA devices"),
        (run_of(1, 1, 80), "2x8", "trainer.data_parallel_shard is 80: the hosts, with 8+8"),
        (
            run_of(1, 1, 9, trainer_hosts=(1,)),
            "2x8",
            "launch.trainer_hosts is (1,): the host, with 8",
        ),
        (run_of(9, 1, 1, generator_hosts=(0,)), "2x8", "launch.generator_hosts is (0,): these"),
        (run_of(1, 1, 1, trainer_parallel=9), "2x8", "trainer.tensor_parallel is 9: the ranks of"),
        (run_of(2, 1, 1), "1x1", "generator.replicas is 2: the host, with 1 CUDA device, has no"),
    ],
)
def test_what_does_not_fit_is_said_with_the_field_to_change(
    config: RunConfig, hosts: str, message: str
) -> None:
    with pytest.raises(NoRoomError) as refusal:
        place(config, made_up_hosts(hosts))
    assert str(refusal.value).startswith(message)
    assert "give" in str(refusal.value)


def test_a_refusal_counts_the_trainer_ranks_that_are_in_the_way() -> None:
    config = run_of(4, 1, 1, generator_hosts=(0,), trainer_hosts=(0,))
    with pytest.raises(NoRoomError, match="no room for 4 replicas of 1 CUDA device and 1 trainer"):
        place(config, hosts_with(4, 4))
    with pytest.raises(NoRoomError, match="3 replicas of 2 CUDA devices; give more"):
        place(run_of(3, 2, 1, generator_hosts=(0,), trainer_hosts=(1,)), hosts_with(4, 4))
    odd = run_of(1, 1, 3, trainer_parallel=2)
    with pytest.raises(NoRoomError, match="6 ranks, of which 2 must be on one host; give fewer"):
        place(odd, hosts_with(3, 3))


@given(
    devices=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    replicas=st.integers(1, 8),
    tensor_parallel=st.integers(1, 4),
    shards=st.integers(1, 12),
    trainer_parallel=st.integers(1, 3),
    is_colocated=st.booleans(),
)
def test_every_rank_has_a_device_of_its_own_and_replicas_never_span_hosts(
    devices: list[int],
    replicas: int,
    tensor_parallel: int,
    shards: int,
    trainer_parallel: int,
    is_colocated: bool,
) -> None:
    placement: Any = "colocated" if is_colocated else "separate"
    config = run_of(
        replicas, tensor_parallel, shards, trainer_parallel=trainer_parallel, placement=placement
    )
    ranks = config.trainer.world_size
    hosts = hosts_with(*devices)
    try:
        plan = plan_on_hosts(config, hosts)
    except NoRoomError:
        if is_colocated:
            rooms = sum(number // tensor_parallel for number in devices)
            groups = sum(number // trainer_parallel for number in devices)
            assert groups < shards or rooms < replicas
        elif tensor_parallel == trainer_parallel == 1:
            assert sum(devices) < ranks + replicas
        return
    assert plan.trainer is not None
    generating = Counter(
        (group.host, device) for group in plan.replicas for device in group.devices
    )
    training = Counter(
        (part.host, device) for part in plan.trainer.on_each_host() for device in part.devices
    )
    assert all(not group.rank_hosts for group in plan.replicas)
    assert all(part.ranks % trainer_parallel == 0 for part in plan.trainer.on_each_host())
    assert sum(part.ranks for part in plan.trainer.on_each_host()) == ranks
    if any(devices):
        assert all(len(group.devices) == group.ranks for group in plan.replicas)
        assert training.total() == ranks
        both = [generating, training] if is_colocated else [generating + training]
        for used in both:
            assert set(used.values()) <= {1}
            assert all(int(device) < devices[host] for host, device in used)


def test_a_plan_says_what_is_on_each_host() -> None:
    config = replace(run_of(2, 1, 2), endpoint=replace(TINY.endpoint, enabled=True))
    config = replace(config, launch=LaunchConfig(trainer_hosts=(1, 2)))
    hosts = made_up_hosts("4x0", ("tls://a:1", "tls://b:1", "tls://c:1", "tls://d:1"))
    plan = plan_on_hosts(config, hosts)
    assert plan.describe().splitlines() == [
        "device: cpu",
        "controller: 1 process on cpu",
        "endpoint: 1 process on cpu, 1 thread each",
        "host0: tls://a:1, 64 cores",
        "  replica0: 1 process on cpu, 1 thread each",
        "host1: tls://b:1, 64 cores",
        "  trainer rank 0: 1 process on cpu, 2 threads each",
        "host2: tls://c:1, 64 cores",
        "  trainer rank 1: 1 process on cpu, 2 threads each",
        "host3: tls://d:1, 64 cores",
        "  replica1: 1 process on cpu, 1 thread each",
    ]
    assert plan.summary() == (
        "host0: 1 replica; host1: 1 trainer rank; host2: 1 trainer rank; host3: 1 replica"
    )


def test_only_a_host_with_more_threads_than_cores_has_processes_that_yield() -> None:
    config = replace(run_of(3, 1, 1), schedule=replace(TINY.schedule, staleness=1))
    small = replace(made_up_hosts("1x0")[0], num_cores=1)
    plan = plan_on_hosts(config, (small, *made_up_hosts("2x0")))
    assert [(group.host, group.yields_cores) for group in plan.replicas] == [
        (0, True),
        (0, True),
        (1, False),
    ]
    assert plan.trainer is not None
    assert not plan.trainer.yields_cores
    assert not plan.shares_cores  # the trainer has a host of its own


@pytest.mark.parametrize(
    ("mask", "num_visible", "names"),
    [
        (None, 2, ("0", "1")),
        (None, 0, ()),
        ("", 0, ()),
        ("4,5", 2, ("4", "5")),
        (" 5 , 4 ", 2, ("5", "4")),
        ("4,-1,5", 1, ("4",)),
        ("-1", 0, ()),
        ("NoDevFiles", 0, ()),
        ("1gpu2,+2", 2, ("1", "2")),
        ("0,7,1", 1, ("0",)),  # there is no device 7, and CUDA stops there
        ("3,3", 0, ()),
        ("3,03", 0, ()),
        ("GPU-8932f937,GPU-5bca6f4c", 2, ("GPU-8932f937", "GPU-5bca6f4c")),
        ("GPU-8932f937,GPU-8932f937", 0, ()),
        ("GPU-8932f937,3", 1, ("GPU-8932f937",)),
        ("3,GPU-8932f937", 1, ("3",)),
        # A process sees one MIG instance at most, whatever its mask names.
        ("MIG-a/1/0,MIG-a/2/0", 1, ("MIG-a/1/0", "MIG-a/2/0")),
        ("MIG-a,MIG-b", 0, ()),
    ],
)
def test_devices_are_named_as_the_parents_mask_names_them(
    mask: str | None, num_visible: int, names: tuple[str, ...]
) -> None:
    assert visible_devices(mask, num_visible=num_visible) == names


def here(**changes: Any) -> RunConfig:
    """Two replicas of one thread each, and a trainer of two threads."""
    base = RunConfig(policy=PolicyConfig(checkpoint="x"), task=Task())
    return replace(base, **changes)


SHARED = {
    "placement": "colocated",
    "pin_cores": True,
    "generator": GeneratorConfig(replicas=2, tensor_parallel=2),
    "trainer": TrainerConfig(data_parallel_shard=2, threads=1),
}


@pytest.mark.parametrize(
    ("config", "devices", "masks"),
    [
        (here(), ("4", "5", "7"), ["4", "5", "7"]),
        (
            here(generator=SHARED["generator"], trainer=TrainerConfig(data_parallel_shard=2)),
            "456789",
            ["4,5", "6,7", "8,9"],
        ),
        (here(**SHARED), "0123", ["0,1", "2,3", "0,1"]),
    ],
)
def test_each_process_gets_devices_of_the_mask_of_its_own_unless_they_are_colocated(
    config: RunConfig, devices: Sequence[str], masks: list[str]
) -> None:
    plan = plan_processes(config, devices=devices)
    assert plan.trainer is not None
    groups = (*plan.replicas, plan.trainer)
    assert [process_environment(group)["CUDA_VISIBLE_DEVICES"] for group in groups] == masks
    assert f"replica1: {plan.replicas[1].ranks} process" in plan.describe()
    assert len({group.seed for group in plan.replicas}) == 2


def test_pinned_processes_get_cores_and_the_controller_stays_off_the_trainers() -> None:
    plan = plan_processes(here(pin_cores=True), cores=[0, 1, 2, 3, 4])
    assert plan.trainer is not None
    assert [group.cores for group in (*plan.replicas, plan.trainer)] == [(0,), (1,), (2, 3)]
    assert plan.controller_cores == (0, 1, 4)
    unpinned = plan_processes(here(), cores=[0, 1])
    assert unpinned.trainer is not None
    assert unpinned.trainer.cores == unpinned.controller_cores == ()
    shared = plan_processes(here(**SHARED), cores=range(5))
    assert shared.trainer is not None
    assert [group.cores for group in (*shared.replicas, shared.trainer)] == [
        (0, 1),
        (2, 3),
        (0, 1),
    ]


@pytest.mark.parametrize(
    ("staleness", "num_cores", "wait_policy"),
    [(0, 2, None), (1, 2, "passive"), (1, 4, None), (0, 1, "passive")],
)
def test_threads_sleep_while_they_wait_where_more_compute_at_once_than_there_are_cores(
    staleness: int, num_cores: int, wait_policy: str | None
) -> None:
    config = here(schedule=ScheduleConfig(staleness=staleness))
    plan = plan_processes(config, cores=range(num_cores))
    assert plan.trainer is not None
    for group in (*plan.replicas, plan.trainer):
        assert process_environment(group).get("OMP_WAIT_POLICY") == wait_policy
    assert plan.shares_cores == (num_cores < 4)


@pytest.mark.parametrize(
    ("config", "devices", "expected"),
    [
        (run_of(2, 1, 2), [4], 4),
        (run_of(2, 1, 2, placement="colocated"), [2], 2),
        (run_of(2, 2, 4, attach=("a", "b")), [4, 4], 8),  # each host has devices 0 to 3
        (run_of(2, 1, 2, attach=("a", "b")), [0, 0], 2),
    ],
)
def test_the_devices_of_a_run_are_counted_once_and_its_hosts_where_it_has_none(
    config: RunConfig, devices: list[int], expected: int
) -> None:
    assert plan_on_hosts(config, hosts_with(*devices)).num_devices == expected
