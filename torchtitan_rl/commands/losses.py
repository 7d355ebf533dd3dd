"""What a run does when processes or hosts are lost:

| lost | then |
|---|---|
| a replica | its requests continue on others; it is started again |
| the endpoint | it is started again on the same port (`serving.restarts`) |
| a server of ``generator.endpoint`` | the run registers again, once the server is back |
| a host | like losing all its replicas; they are started again when the host is back |
| a trainer rank | the trainer is started again, and takes the steps since a checkpoint again; with
  replicas on other hosts the run ends with `TrainerLostError`, and can be resumed |
| a host of the trainer | the run ends with `TrainerLostError`, and can be resumed |

A host that is about to end (SIGTERM to its worker) is not lost: its replicas leave it as those that
`scale` removes, and are started again when it is back. If it is a host of the trainer, the run ends
as by SIGTERM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torchtitan_rl.config.machine import CONTROLLER_HOST, host_name
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.scaling import plan_replicas
from torchtitan_rl.errors import ConfigError, HostLostError, TrainerLostError
from torchtitan_rl.files import last_lines
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.orchestration.fixed_policy import FixedPolicy
from torchtitan_rl.orchestration.run_state import Claim, Trainer
from torchtitan_rl.orchestration.taken_steps import TakenSteps
from torchtitan_rl.orchestration.trainer_restarts import RestartedTrainer
from torchtitan_rl.routing.replicas import Replica
from torchtitan_rl.routing.restarts import ReplicaRestarts, first_name
from torchtitan_rl.routing.router import GeneratorRouter

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.host_watch import HostWatch
    from torchtitan_rl.backends.monarch.hosts import Hosts
    from torchtitan_rl.backends.monarch.run import RunProcesses
    from torchtitan_rl.backends.monarch.trainer import MonarchTrainer

_LAST_LINES = 5


class FailureHandling:
    """Handles lost hosts of a run while `watching` is open, restarts lost replicas while
    `restarting` is open, and the trainer while `trainer` is open."""

    def __init__(
        self,
        prepared: PreparedRun,
        hosts: Hosts | None,
        recorder: RunRecorder,
        *,
        stop: Callable[[], None],
    ) -> None:
        self._prepared, self._plan = prepared, prepared.plan
        self._run_dir = prepared.config.run_dir.absolute()
        self._log_dir = prepared.config.log_dir.absolute()
        self._recorder, self._say, self._stop = recorder, recorder.say, stop
        self._on_failure = recorder.record_failure
        self._watch: HostWatch | None = None
        if hosts is not None:
            from torchtitan_rl.backends.monarch.host_watch import HostWatch

            self._watch = HostWatch(
                hosts,
                log_dir=self._log_dir,
                trace_dir=recorder.trace_dir,
                say=self._say,
                on_lost=self._on_host_lost,
                on_leaving=self._leave_host,
                on_failure=self._on_failure,
            )
        self._run: tuple[RunProcesses, GeneratorRouter] | None = None
        self._restarts: ReplicaRestarts | None = None
        self._all_restarts: list[ReplicaRestarts] = []  # those of teachers, too
        self._trainer: RestartedTrainer | MonarchTrainer | None = None
        self._trainer_name = "trainer"
        self._trainer_host_lost: HostLostError | None = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the hosts. Keep the context open from before processes start until they have
        ended."""
        async with self._watch or nullcontext():
            try:
                yield
            except TrainerLostError:
                await self._show_trainer()
                raise

    @asynccontextmanager
    async def trainer(self, processes: RunProcesses, claim: Claim) -> AsyncIterator[Trainer]:
        """The trainer of a run. If it is lost, it is started again."""
        if not processes.trainers:
            yield FixedPolicy()
            return
        self._trainer = first = processes.trainers[0]
        max_restarts = self._prepared.config.trainer.max_restarts
        if max_restarts == 0:
            yield first
            return
        self._trainer = restarted = RestartedTrainer(
            first,
            partial(self._start_trainer, processes),
            weights=processes.weights,
            steps=TakenSteps(self._run_dir / "taken_steps"),
            max_restarts=max_restarts,
            check=claim.check,
            is_offloaded=self._plan.is_shared,
            say=self._say,
            on_failure=self._on_failure,
        )
        try:
            yield restarted
        finally:
            await restarted.close()

    @asynccontextmanager
    async def restarting(
        self, processes: RunProcesses, router: GeneratorRouter, *, reserved: tuple[str, ...]
    ) -> AsyncIterator[None]:
        self._run = processes, router
        shares_devices = self._plan.is_shared
        restarts = self.restarts(router, shares_devices=shares_devices, reserved=reserved)
        async with restarts:
            self._restarts = restarts
            yield

    async def scale(self, number: int) -> str:
        """Change the number of replicas; see `ReplicaRestarts.scale`."""
        config = self._prepared.config
        if config.mode == "train":
            raise ConfigError("RUN_DIR: the run only trains, so it has no replicas")
        if config.generator.endpoint:
            raise ConfigError("RUN_DIR: the run uses the replicas of generator.endpoint")
        if config.is_colocated:
            raise ConfigError("RUN_DIR: with placement colocated the number of replicas is fixed")
        if self._run is None or self._restarts is None:
            raise ConfigError("RUN_DIR: the run is still starting; try again")
        processes, router = self._run

        def plan(missing: int) -> list[str]:
            running = [processes.groups[first_name(name)] for name in router.versions()]
            first_index = sum(name.startswith("replica") for name in processes.groups)
            indices = range(first_index, first_index + missing)
            more = plan_replicas(self._prepared, running, indices)
            processes.groups.update({group.name: group for group in more})
            return [group.name for group in more]

        try:
            return await self._restarts.scale(number, plan)
        finally:
            live = tuple(processes.groups[first_name(name)] for name in router.versions())
            self._recorder.num_devices = replace(self._plan, replicas=live).num_devices

    @property
    def scaling_waits_for(self) -> str:
        return "" if self._restarts is None else self._restarts.waits_for

    def restarts(
        self,
        router: GeneratorRouter,
        *,
        shares_devices: bool = False,
        reserved: tuple[str, ...] = (),
    ) -> ReplicaRestarts:
        """Restarts of a router's replicas; for those of teachers, while `restarting` is open."""
        restarts = ReplicaRestarts(
            router,
            self._start,
            max_restarts=self._prepared.config.generator.max_restarts,
            say=self._say,
            is_alone=self._is_alone,
            reserved=reserved,
            shares_devices=shares_devices,
            on_failure=self._on_failure,
        )
        self._all_restarts.append(restarts)
        return restarts

    async def _leave_host(self, host: int) -> None:
        if host in self._trainer_hosts():
            self._say(f"{host_name(host)} has the trainer, so the run ends")
            self._stop()
            await asyncio.Event().wait()  # until the run has ended
        if self._run is not None:
            names = self._names_on(host)
            leaving = (
                one.vacate(lambda name: first_name(name) in names) for one in self._all_restarts
            )
            await asyncio.gather(*leaving)
            self._run[0].lose_host(host)

    def _names_on(self, host: int) -> set[str]:
        assert self._run is not None
        return {group.name for group in self._run[0].groups.values() if group.host == host}

    def _on_host_lost(self, host: int, cause: str) -> None:
        if self._run is None:
            return  # the processes are still starting, and their start fails by itself
        processes, router = self._run
        names = self._names_on(host)
        processes.lose_host(host)
        error = HostLostError(f"{host_name(host)} is lost: {cause}")
        router.give_up(lambda name: first_name(name) in names, error)
        if self._trainer is not None and host in self._trainer_hosts():
            self._trainer_host_lost = error
            self._trainer.lose(error)

    async def _start_trainer(self, processes: RunProcesses) -> MonarchTrainer:
        """Raises HostLostError if a host of it was lost: cut off, it may still run there."""
        await self._show_trainer()
        if self._watch is not None:
            for host in self._trainer_hosts():
                await self._watch.answers(host)
        if self._trainer_host_lost is not None:
            raise self._trainer_host_lost
        self._trainer_name = f"trainer-{len(processes.trainers) + 1}"
        return await processes.restart_trainer(self._trainer_name)

    async def _show_trainer(self) -> None:
        for host in self._trainer_hosts():
            await self._show_last_lines(self._trainer_name, host)

    def _trainer_hosts(self) -> list[int]:
        trainer = self._plan.trainer
        return [] if trainer is None else [part.host for part in trainer.on_each_host()]

    async def _start(self, lost: str, name: str) -> Replica:
        """Start the replica ``name`` in place of ``lost``, once its host answers."""
        assert self._run is not None
        first, host = first_name(lost), self._host_of(lost)
        await self._show_last_lines(lost, host)
        if self._watch is not None:
            await self._watch.wait_until_there(host)
        processes, _ = self._run
        replica = await processes.restart(first, name)
        if self._watch is not None and self._watch.is_leaving(host):
            await replica.close()
            raise HostLostError(f"{host_name(host)} is about to end")
        return replica

    async def _is_alone(self, name: str) -> bool:
        return self._watch is None or await self._watch.answers(self._host_of(name))

    def _host_of(self, replica: str) -> int:
        group = None if self._run is None else self._run[0].groups.get(first_name(replica))
        return CONTROLLER_HOST if group is None else group.host  # behind a URL: no process of ours

    async def _show_last_lines(self, name: str, host: int) -> None:
        """Show the last log lines of a group's processes, by host and rank. If their host is lost,
        show nothing, because the loss of the host is the cause."""
        where = ""
        if self._watch is not None and self._watch.is_far(host):
            if self._watch.is_lost(host):
                return
            await self._watch.bring_now(host)
            where = f"{host_name(host)}/"
        for path in sorted(self._log_dir.glob(f"{where.replace('/', '-')}{name}-rank*.log")):
            rank = path.stem.rpartition("-rank")[2]
            for line in last_lines(path, _LAST_LINES):
                self._say(f"{where}{name} rank {rank}: {line}")
