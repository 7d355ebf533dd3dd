"""What a run does when processes or hosts are lost: it goes on where it can, and says what it lost.

| lost | then |
|---|---|
| a replica | its requests continue on others; it is started again |
| a host | as all its replicas at once; they start again there when it is back |
| a trainer rank, or its host | the run ends with `TrainerLostError`, and can be resumed |
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from torchtitan_rl.config.machine import host_name
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.errors import ReplicaError, TrainerLostError
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.observability.trace import last_lines
from torchtitan_rl.routing.replicas import Replica
from torchtitan_rl.routing.restarts import ReplicaRestarts, first_name
from torchtitan_rl.routing.router import GeneratorRouter

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.host_watch import HostWatch
    from torchtitan_rl.backends.monarch.hosts import Hosts
    from torchtitan_rl.backends.monarch.run import RunProcesses

_LAST_LINES = 5


class FailureHandling:
    """Watches the hosts of a run while `watching` is open, and its replicas in `restarting`."""

    def __init__(self, prepared: PreparedRun, hosts: Hosts | None, recorder: RunRecorder) -> None:
        self._plan = prepared.plan
        self._max_restarts = prepared.config.generator.max_restarts
        self._log_dir = prepared.config.log_dir.absolute()
        self._say = recorder.say
        self._watch: HostWatch | None = None
        if hosts is not None:
            from torchtitan_rl.backends.monarch.host_watch import HostWatch

            self._watch = HostWatch(
                hosts,
                log_dir=self._log_dir,
                trace_dir=recorder.trace_dir,
                say=self._say,
                on_lost=self._on_host_lost,
            )
        self._run: tuple[RunProcesses, GeneratorRouter] | None = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Open it before processes start, and until they have ended."""
        async with self._watch or nullcontext():
            try:
                yield
            except TrainerLostError:
                trainer = self._plan.trainer
                for part in () if trainer is None else trainer.on_each_host():
                    await self._show_last_lines(part.name, part.host)
                raise

    @asynccontextmanager
    async def restarting(
        self, processes: RunProcesses, router: GeneratorRouter, *, reserved: tuple[str, ...]
    ) -> AsyncIterator[None]:
        self._run = processes, router
        restarts = ReplicaRestarts(
            router,
            self._start,
            max_restarts=0 if self._plan.is_shared else self._max_restarts,
            say=self._say,
            is_alone=self._is_alone,
            reserved=reserved,
        )
        async with restarts:
            yield

    def _on_host_lost(self, host: int, cause: str) -> None:
        if self._run is None:
            return  # the start fails by itself
        processes, router = self._run
        message = f"{host_name(host)} is lost: {cause}"
        names = {group.name for group in self._plan.replicas if group.host == host}
        processes.lose_host(host)
        router.give_up(lambda name: first_name(name) in names, ReplicaError(message))
        trainer = self._plan.trainer
        if trainer is not None and host in {part.host for part in trainer.on_each_host()}:
            processes.trainer.lose(message)

    async def _start(self, lost: str, name: str) -> Replica:
        """Start ``name`` in the place of ``lost``, once its host answers."""
        assert self._run is not None
        first, host = first_name(lost), self._host_of(lost)
        await self._show_last_lines(lost, host)
        if self._watch is not None:
            await self._watch.wait_until_there(host)
        processes, _ = self._run
        return await processes.restart(first, name)

    async def _is_alone(self, name: str) -> bool:
        return self._watch is None or await self._watch.answers(self._host_of(name))

    def _host_of(self, replica: str) -> int:
        names = {group.name: group.host for group in self._plan.replicas}
        return names[first_name(replica)]

    async def _show_last_lines(self, name: str, host: int) -> None:
        """What the processes of a group printed last, by host and rank; nothing where their host is
        lost, which is the cause."""
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
