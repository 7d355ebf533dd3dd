"""The hosts of a run as they are configured: each error in one line, before any is contacted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_rl.config.hosts import host_errors, host_notes, launch_errors, start_errors
from torchtitan_rl.config.machine import HostFacts, made_up_hosts
from torchtitan_rl.config.model import read_policy_facts
from torchtitan_rl.config.plan import plan_on_hosts
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.config.run import LaunchConfig, MonarchConfig, RunConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError

MACHINE = HostFacts(num_cores=2, memory_bytes=24 << 30)
FAR = ("tls://10.0.0.2:26600", "tls://10.0.0.3:26600")
NEAR = ("tcp://127.0.0.2:26600", "tcp://127.0.0.3:26600")
PLAIN: dict[str, Any] = {"attach": NEAR, "allow_plain_tcp": True}
JOB: dict[str, Any] = {"job": "tests.support.monarch_jobs.one", "allow_plain_tcp": True}
OWN = "tls://10.0.0.1:26600"
KEYS = Path("keys")


@pytest.mark.parametrize(
    "launch",
    [
        LaunchConfig(),
        LaunchConfig(**PLAIN),
        LaunchConfig(attach=("local", NEAR[0]), allow_plain_tcp=True),
        LaunchConfig(attach=FAR, address=OWN, keys=KEYS),
        LaunchConfig(attach=FAR, address=OWN, keys=KEYS, hosts="2x8", trainer_hosts=(1,)),
        LaunchConfig(hosts="4x0", generator_hosts=(0, 3)),
        LaunchConfig(**JOB),
        LaunchConfig(**JOB, hosts="2x8", trainer_hosts=(1,)),
    ],
)
def test_hosts_that_can_be_used(launch: LaunchConfig) -> None:
    assert launch_errors(replace(TINY, launch=launch)) == []


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"attach": ("10.0.0.2",)}, "launch.attach is '10.0.0.2': give tls://HOST:PORT"),
        ({"attach": ("tcp://10.0.0.2:1",), "address": OWN, "keys": KEYS}, "launch.attach is 'tcp"),
        ({"attach": NEAR}, f"launch.attach is '{NEAR[0]}': tcp:// is neither encrypted nor auth"),
        ({"attach": FAR, "address": OWN}, "launch.attach is 'tls://10.0.0.2:26600': tls:// needs"),
        ({"attach": FAR, "keys": KEYS}, "launch.address is '': tls://10.0.0.2:26600 must reach"),
        ({**PLAIN, "address": "local"}, "launch.address is 'local': give the address"),
        (
            {**PLAIN, "attach": NEAR[:1] * 2},
            "launch.attach has tcp://127.0.0.2:26600 more than once",
        ),
        ({"address": OWN}, "launch.address is 'tls://10.0.0.1:26600': only workers use it"),
        ({"hosts": "4"}, "launch.hosts is '4': give NUMBERxDEVICES"),
        ({"hosts": "3x8", "attach": NEAR}, "launch.hosts is '3x8': launch.attach has 2 hosts"),
        ({"hosts": "2x8", "trainer_hosts": (2,)}, "launch.trainer_hosts is (2,): the run has 2 "),
        (
            {"hosts": "1x8", "trainer_hosts": (1,)},
            "launch.trainer_hosts is (1,): the run has 1 host,",
        ),
        ({**PLAIN, "generator_hosts": (0, 0)}, "launch.generator_hosts is (0, 0): give ea"),
        ({"trainer_hosts": (0,)}, "launch.trainer_hosts is (0,): the run is on this machine"),
        ({"job": JOB["job"]}, "launch.allow_plain_tcp is False: the hosts of launch.job neither"),
        ({**JOB, "job": "jobs"}, "launch.job is 'jobs': give MODULE.ATTR, such as jobs.slurm for"),
        ({**JOB, "job": "none.such"}, "launch.job is 'none.such': there is no none; give a module"),
        ({**JOB, "keys": KEYS}, "launch.keys: not with launch.job, which has hosts of its own"),
        ({**JOB, "trainer_hosts": (0,)}, "launch.trainer_hosts: not with launch.job, which has "),
        ({**JOB, "address": OWN}, f"launch.address is '{OWN}': only workers use it"),
    ],
)
def test_each_error_names_the_field_and_the_fix(launch: dict[str, Any], message: str) -> None:
    errors = launch_errors(replace(TINY, launch=LaunchConfig(**launch)))
    assert errors
    assert errors[0].startswith(message), errors
    assert "give" in errors[0] or "make" in errors[0]


def test_all_errors_of_a_job_come_at_once() -> None:
    launch = LaunchConfig(job="none.such", attach=NEAR, keys=KEYS, hosts="3x")
    assert [one.partition(":")[0] for one in launch_errors(replace(TINY, launch=launch))] == [
        "launch.hosts is '3x'",
        "launch.attach, launch.keys",
        "launch.allow_plain_tcp is False",
    ]


def test_cores_are_not_given_out_on_other_hosts_and_made_up_hosts_do_not_start() -> None:
    config = replace(TINY, pin_cores=True, launch=LaunchConfig(**PLAIN))
    assert launch_errors(config)[0].startswith("pin_cores is True")
    assert start_errors(LaunchConfig(hosts="2x8"))[0].startswith("launch.hosts is '2x8'")
    assert start_errors(LaunchConfig(**PLAIN)) == []


@pytest.mark.parametrize(
    "launch",
    [
        LaunchConfig(**PLAIN),
        LaunchConfig(attach=FAR, address=OWN, keys=KEYS),
        LaunchConfig(hosts="2x8"),
    ],
)
def test_telemetry_pages_are_for_runs_on_this_machine(launch: LaunchConfig) -> None:
    config = replace(TINY, monarch=MonarchConfig(telemetry=True))
    assert launch_errors(config) == []
    (error,) = launch_errors(replace(config, launch=launch))
    assert error.startswith("monarch.telemetry is True: it is for runs on this machine alone")


def test_keys_that_tcp_would_not_use_are_refused() -> None:
    config = LaunchConfig(**PLAIN, keys=Path("k"))
    (error,) = launch_errors(replace(TINY, launch=config))
    assert "tcp:// does not use launch.keys; give tls://, or no keys" in error


def on_job(config: RunConfig, *meshes: str) -> tuple[str, str]:
    """Where the plan has the trainer and the replicas, on hosts of these meshes."""
    config = replace(config, launch=LaunchConfig(**JOB))
    plan = prepare_run(
        config, MACHINE, ask_hosts=lambda _: tuple(replace(cpu_host(), mesh=one) for one in meshes)
    ).plan
    assert plan.trainer is not None
    return meshes[plan.trainer.host], " ".join(meshes[group.host] for group in plan.replicas)


def test_the_meshes_of_a_job_place_the_parts(tmp_path: Path) -> None:
    config = replace(TINY, output_dir=tmp_path)
    assert on_job(config, "trainers", "generators") == ("trainers", "generators generators")
    assert on_job(config, "generator0", "generator1", "trainer") == (
        "trainer",
        "generator0 generator1",
    )
    assert on_job(config, "hosts", "hosts")  # one mesh has both
    for meshes in (("trainer", "data"), ("trainer", "generator", "data"), ("a", "b")):
        with pytest.raises(ConfigError, match="let each name begin with trainer or generator"):
            on_job(config, *meshes)
    colocated = replace(config, placement="colocated", rollout=TINY.rollout)
    with pytest.raises(ConfigError, match="with placement colocated trainer and replicas share"):
        on_job(colocated, "trainer", "generator")


def cpu_host(cores: int = 64, memory_bytes: int = 1 << 40) -> HostFacts:
    return HostFacts(address="", num_cores=cores, memory_bytes=memory_bytes)


def test_a_host_needs_cores_and_memory_for_what_is_on_it_and_no_more() -> None:
    policy = read_policy_facts(Path(TINY.policy.checkpoint))
    crowd = replace(TINY, generator=replace(TINY.generator, threads=8))
    assert host_errors(crowd, policy, [cpu_host(), cpu_host(1)]) == []
    (threads,) = host_errors(crowd, policy, [cpu_host(1), cpu_host()])
    assert threads.startswith("generator.threads is 8: 16 threads compute on host0")
    (memory,) = host_errors(TINY, policy, [cpu_host(), cpu_host(memory_bytes=1 << 30)])
    assert "host1 has 1 GiB" in memory


def test_memory_is_not_shared_between_hosts() -> None:
    sync = replace(TINY.weight_sync, transport="shared_memory")
    config = replace(TINY, weight_sync=sync)
    (error,) = host_errors(config, None, made_up_hosts("2x0"))
    assert error.startswith("weight_sync.transport is shared_memory")
    assert host_errors(config, None, made_up_hosts("1x0")) == []


def test_gradients_leave_a_machine_in_plain_text_only_where_that_is_allowed() -> None:
    trainer = replace(TINY.trainer, data_parallel_shard=2)
    config = replace(TINY, trainer=trainer, launch=LaunchConfig(trainer_hosts=(0, 1)))
    near, far = (
        [replace(cpu_host(), address=f"tls://{net}.{n}:26600") for n in (1, 2)]
        for net in ("127.0.0", "10.0.0")
    )
    assert host_errors(config, None, near) == []
    (error,) = host_errors(config, None, far)
    assert error.startswith("launch.allow_plain_tcp is False: trainer ranks on host0, host1 would")
    allowed = replace(config, launch=replace(config.launch, allow_plain_tcp=True))
    assert host_errors(allowed, None, far) == []
    together = replace(config, launch=LaunchConfig(trainer_hosts=(1,)))
    assert host_errors(together, None, far) == []
    assert host_notes(config.launch, plan_on_hosts(config, near)) == []
    (note,) = host_notes(allowed.launch, plan_on_hosts(allowed, far))
    assert note.startswith("trainer ranks on host0, host1 exchange gradients unencrypted")


def test_hosts_are_asked_once_everything_else_is_right_and_planned_with_what_they_have(
    tmp_path: Path,
) -> None:
    asked: list[Path] = []

    def ask(policy_dir: Path) -> tuple[HostFacts, ...]:
        asked.append(policy_dir)
        return (cpu_host(4), cpu_host(8))

    config = replace(TINY, output_dir=tmp_path, launch=LaunchConfig(**PLAIN))
    with pytest.raises(ConfigError, match="num_steps"):
        prepare_run(replace(config, num_steps=0), MACHINE, ask_hosts=ask)
    assert asked == []
    prepared = prepare_run(config, MACHINE, ask_hosts=ask)
    assert asked == [prepared.policy_dir]
    assert [host.num_cores for host in prepared.plan.hosts] == [4, 8]
    dry = replace(config, launch=replace(config.launch, hosts="2x8"))
    assert prepare_run(dry, MACHINE, ask_hosts=ask).plan.device == "cuda"
    assert len(asked) == 1


def test_a_dry_run_on_hosts_that_are_not_there_needs_no_policy_here(tmp_path: Path) -> None:
    absent = str(tmp_path / "checkpoints" / "policy")
    config = replace(TINY, policy=replace(TINY.policy, checkpoint=absent), output_dir=tmp_path)
    dry = replace(config, launch=LaunchConfig(hosts="2x8"))
    assert (
        prepare_run(dry, MACHINE)
        .notes[-1]
        .startswith(f"policy.checkpoint is {absent!r}: it is not on this machine")
    )
    with pytest.raises(ConfigError, match="there is no such directory"):
        prepare_run(config, MACHINE)
    for wrong in (str(tmp_path), "package:none"):
        policy = replace(TINY.policy, checkpoint=wrong)
        with pytest.raises(ConfigError, match="give"):
            prepare_run(replace(dry, policy=policy), MACHINE)
