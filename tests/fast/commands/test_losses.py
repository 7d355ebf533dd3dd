"""What a run does when a host is lost, and when a replica is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.replicas import GatedReplica, settle
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.backends.monarch.run import RunProcesses
from torchtitan_rl.commands.losses import FailureHandling
from torchtitan_rl.commands.train import _export, _Run
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.plan import ProcessGroup, ProcessPlan
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError, HostLostError, RunTakenOverError
from torchtitan_rl.failures import Failure
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.orchestration.run_state import Unshared
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.config import Keys
from torchtitan_rl.weights.config import Transport

DEAD, SERVING = Phase.DEAD, Phase.SERVING


class Weights:
    """As `WeightDistribution`: what fetches, by host."""

    def __init__(self) -> None:
        self.fetchers: dict[int, Any] = {}

    def replace(self, host: int, fetcher: Any) -> None:
        self.fetchers[host] = fetcher


class Trainer:
    def __init__(self) -> None:
        self.lost: list[BaseException] = []
        self.exported: list[Path] = []

    def lose(self, cause: BaseException) -> None:
        self.lost.append(cause)

    async def export_hf(self, path: Path) -> None:
        self.exported.append(path)


class Run:
    """The trainer on host 0, and a replica on each of 1 and 2, whose weights are fetched there."""

    def __init__(self, *, max_restarts: int = 2) -> None:
        groups = [ProcessGroup(name=f"replica{n}", ranks=1, threads=1, host=n + 1) for n in (0, 1)]
        plan = ProcessPlan(
            device="cpu",
            replicas=tuple(groups),
            trainer=ProcessGroup(name="trainer", ranks=1, threads=1, host=0),
        )
        generator = replace(TINY.generator, max_restarts=max_restarts)
        config = replace(TINY, generator=generator)
        self.prepared = PreparedRun(config=config, policy_dir=Path(), plan=plan, keys=Keys())
        self.trainer, self.weights, self.said = Trainer(), Weights(), list[str]()
        self.failures: list[Failure] = []
        self.processes = RunProcesses(
            trainers=[cast(Any, self.trainer)],
            replicas=[],
            teachers={},
            groups={group.name: group for group in groups},
            endpoint=None,
            prepared=self.prepared,
            hosts=Hosts(),
            weights=cast(Any, self.weights),
            weight_hosts=dict.fromkeys((1, 2), cast(Any, "of the start")),
            transport=Transport.SHARED_MEMORY,
            trace_dir=None,
        )
        self.router = GeneratorRouter([GatedReplica("replica0"), GatedReplica("replica1")])
        self.recorder = SimpleNamespace(
            say=self.said.append, trace_dir=None, record_failure=self.failures.append
        )
        self.num_stops = 0
        self.losses = FailureHandling(
            self.prepared, None, cast(RunRecorder, self.recorder), stop=self.stop
        )

    def stop(self) -> None:
        self.num_stops += 1

    @asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        async with self.losses.restarting(self.processes, self.router, reserved=()):
            yield


def test_a_lost_host_loses_its_replicas_and_its_weights_and_no_others() -> None:
    async def play() -> None:
        run = Run(max_restarts=0)
        async with run.going():
            run.losses._on_host_lost(2, "no answer for 15 s")
            await settle()
        assert run.router.states() == {"replica0": SERVING, "replica1": DEAD}
        assert run.weights.fetchers.keys() == {2}
        assert run.processes.weight_hosts[1] == "of the start"
        assert run.processes.weight_hosts[2] is run.weights.fetchers[2]
        assert run.trainer.lost == []

    run_virtually(play())


def test_a_trainer_whose_host_was_lost_is_not_started_again() -> None:
    async def play() -> None:
        run = Run()
        run.losses._trainer = cast(Any, run.trainer)
        async with run.going():
            run.losses._on_host_lost(0, "no answer for 15 s")
            assert len(run.trainer.lost) == 1
            with pytest.raises(HostLostError, match="no answer for 15 s"):
                await run.losses._start_trainer(run.processes)

    run_virtually(play())


def test_replicas_and_teachers_leave_a_host_that_is_about_to_end_and_nothing_is_lost() -> None:
    async def play() -> None:
        run = Run(max_restarts=0)
        run.processes.groups["teacher0"] = ProcessGroup(name="teacher0", ranks=1, threads=1, host=2)
        teachers = GeneratorRouter([GatedReplica("teacher0"), GatedReplica("teacher1")])
        async with run.going(), run.losses.restarts(teachers):
            await run.losses._leave_host(2)
            assert run.router.states() == {"replica0": SERVING}
            assert teachers.states() == {"teacher1": SERVING}
            assert run.weights.fetchers.keys() == {2}
            run.losses._on_host_lost(2, "it has left")
            await settle()
        assert run.said == ["replica1 has left", "teacher0 has left"]
        assert (run.failures, run.trainer.lost, run.num_stops) == ([], [], 0)

    run_virtually(play())


def test_a_run_whose_trainer_is_on_a_host_that_is_about_to_end_stops() -> None:
    async def play() -> None:
        run = Run()
        async with run.going():
            leaving = asyncio.create_task(run.losses._leave_host(0))
            await settle()
            assert run.num_stops == 1
            assert not leaving.done()  # so that the host stays until the run has ended
            leaving.cancel()
        assert run.said == ["host0 has the trainer, so the run ends"]

    run_virtually(play())


def test_a_replica_that_was_started_on_a_host_that_is_about_to_end_is_closed(monkeypatch) -> None:
    async def play() -> None:
        run, started = Run(), list[GatedReplica]()

        async def restart(_: RunProcesses, first: str, name: str) -> GatedReplica:
            started.append(GatedReplica(name))
            return started[-1]

        async def is_there(host: int) -> None:
            assert host == 2

        monkeypatch.setattr(RunProcesses, "restart", restart)
        watch = SimpleNamespace(
            is_leaving=lambda host: True, is_far=lambda host: False, wait_until_there=is_there
        )
        async with run.going():
            run.losses._watch = cast(Any, watch)
            with pytest.raises(HostLostError, match="host2 is about to end"):
                await run.losses._start("replica1", "replica1-2")
        assert started[0].is_closed

    run_virtually(play())


def test_added_replicas_are_on_the_hosts_of_the_plan_and_are_lost_with_them(monkeypatch) -> None:
    async def play() -> None:
        run = Run(max_restarts=0)

        async def restart(_: RunProcesses, first: str, name: str) -> GatedReplica:
            assert (first, run.losses._host_of(name)) in (("replica2", 1), ("replica3", 2))
            return GatedReplica(name)

        monkeypatch.setattr(RunProcesses, "restart", restart)
        hosts = tuple(HostFacts(address="", num_cores=4, memory_bytes=1) for _ in range(3))
        plan = replace(run.prepared.plan, hosts=hosts)
        run.losses._prepared = replace(run.prepared, plan=plan)
        with pytest.raises(ConfigError, match="the run is still starting"):
            await run.losses.scale(4)
        async with run.going():
            four = "4 replicas: replica0, replica1, replica2, replica3"
            assert await run.losses.scale(4) == four
            assert run.recorder.num_devices == 3  # without CUDA, hosts
            run.losses._on_host_lost(2, "no answer for 15 s")
            await settle()
            states = run.router.states()
            assert {name for name in states if states[name] is DEAD} == {"replica1", "replica3"}
            assert await run.losses.scale(1) == "1 replica: replica0"
            assert run.recorder.num_devices == 2

    run_virtually(play())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mode": "train"}, "only trains"),
        ({"placement": "colocated"}, "with placement colocated"),
        ({"generator": GeneratorConfig(endpoint="http://host:1")}, "generator.endpoint"),
    ],
)
def test_runs_without_replicas_of_their_own_refuse_another_number(changes, why) -> None:
    async def play() -> None:
        run = Run()
        run.losses._prepared = replace(run.prepared, config=replace(TINY, **changes))
        async with run.going():
            with pytest.raises(ConfigError, match=why):
                await run.losses.scale(2)

    run_virtually(play())


class TakenOver(Unshared):
    def check(self) -> None:
        raise RunTakenOverError("run.lease", successor="another host")


def test_a_run_that_was_taken_over_exports_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        started = Run()
        recorder = RunRecorder(TINY, started.prepared.plan, resume_step=None)
        for claim in (TakenOver(), Unshared()):
            one = cast(_Run, SimpleNamespace(claim=claim, prepared=started.prepared))
            try:
                await _export(one, cast(Any, started.trainer), recorder)
            except RunTakenOverError:
                assert started.trainer.exported == []
        assert started.trainer.exported == [TINY.run_dir.absolute() / "policy"]

    run_virtually(play())
