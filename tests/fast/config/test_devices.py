from __future__ import annotations

import pytest

from torchtitan_rl import GeneratorConfig, ScheduleConfig, TrainerConfig
from torchtitan_rl.backends.monarch.runtime import process_environment
from torchtitan_rl.config.checks.machine import visible_devices
from torchtitan_rl.config.plan import plan_processes
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.rollout.task import Task


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


def test_under_a_mask_each_process_gets_devices_of_that_mask() -> None:
    config = RunConfig(policy=PolicyConfig(checkpoint="x"), task=Task())
    plan = plan_processes(config, devices=visible_devices("4,5,7", num_visible=3))
    masks = [
        process_environment(group)["CUDA_VISIBLE_DEVICES"]
        for group in (*plan.replicas, plan.trainer)
    ]
    assert masks == ["4", "5", "7"]
    assert "replica1: 1 process on cuda:5" in plan.describe()


@pytest.mark.parametrize(
    ("staleness", "num_cores", "wait_policy"),
    [(0, 2, None), (1, 2, "passive"), (1, 4, None), (0, 1, "passive")],
)
def test_threads_sleep_while_they_wait_where_more_compute_at_once_than_there_are_cores(
    staleness: int, num_cores: int, wait_policy: str | None
) -> None:
    """Two replicas of one thread each, and a trainer of two."""
    config = RunConfig(
        policy=PolicyConfig(checkpoint="x"),
        task=Task(),
        schedule=ScheduleConfig(staleness=staleness),
        trainer=TrainerConfig(threads=2),
    )
    plan = plan_processes(config, cores=range(num_cores))
    assert plan.trainer is not None
    for group in (*plan.replicas, plan.trainer):
        assert process_environment(group).get("OMP_WAIT_POLICY") == wait_policy


@pytest.mark.parametrize("staleness", [0, 1])
def test_trainer_and_replicas_share_cores_where_all_their_threads_are_more(staleness: int) -> None:
    config = RunConfig(
        policy=PolicyConfig(checkpoint="x"),
        task=Task(),
        schedule=ScheduleConfig(staleness=staleness),
        trainer=TrainerConfig(threads=2),
    )
    assert plan_processes(config, cores=range(2)).shares_cores
    assert not plan_processes(config, cores=range(4)).shares_cores
    assert not plan_processes(config, cores=range(2), devices="012").shares_cores


@pytest.mark.parametrize("num_devices", [0, 2])
def test_a_trainer_on_the_cpu_keeps_the_memory_of_its_tensors(num_devices: int) -> None:
    config = RunConfig(
        policy=PolicyConfig(checkpoint="x"), task=Task(), generator=GeneratorConfig(replicas=1)
    )
    plan = plan_processes(config, devices=("0", "1")[:num_devices])
    assert plan.trainer is not None
    groups = (*plan.replicas, plan.trainer)
    keeps = ["MALLOC_MMAP_MAX_" in process_environment(group) for group in groups]
    assert keeps == [False, num_devices == 0]
