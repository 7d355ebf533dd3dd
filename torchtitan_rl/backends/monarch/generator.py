"""A generator replica in processes of its own: one actor a rank, each with its engine loop.

The actors are shells: rank 0 passes calls to its `LoopReplica`, the other ranks follow the
broadcast decisions and only stage weights. Requests, their progress and their ends travel through
an `Exchange`, in few calls, for each costs milliseconds. All endpoints are concurrent, for a plain
one would hold up every other call of its actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from monarch.actor import Actor, concurrent_endpoint, current_rank

from torchtitan_rl.backends.monarch.runtime import (
    ProcessLostError,
    ProcessMesh,
    call,
    process_environment,
    spawn_processes,
    stop_processes,
)
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import DeadlineError, WeightSyncError
from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.generation.mailbox import Batch, News
from torchtitan_rl.routing.exchange import Exchange
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    GenerationRequest,
    OnProgress,
    OnReading,
    PullReport,
)
from torchtitan_rl.weights.handle import WeightHandle
from torchtitan_rl.weights.transport import host_name

_QUICK_CALL_S = 60.0  # deadline of calls that only ask
_LOST_CLOSE_S = 2.0  # one that is lost is asked all the same: other ranks may be well


class GeneratorActor(Actor):
    """One rank of a replica."""

    def __init__(self, spec: GeneratorSpec) -> None:
        self._spec = spec
        self._rank = current_rank().rank

    @concurrent_endpoint
    async def host(self) -> str:
        return host_name()

    @concurrent_endpoint
    async def start(self) -> None:
        """Build the engine (all ranks together) and start stepping."""
        from torchtitan_rl.backends.monarch.generator_rank import GeneratorRank

        self._generator = await asyncio.to_thread(GeneratorRank, self._spec, self._rank)

    @concurrent_endpoint
    async def submit(self, batch: Batch) -> None:
        self._generator.mailbox.submit(batch)

    @concurrent_endpoint
    async def collect(self) -> News:
        return await self._generator.mailbox.collect()

    @concurrent_endpoint
    async def stage(self, handle: WeightHandle) -> None:
        await self._generator.stage(handle)

    @concurrent_endpoint
    async def pull(self, version: int) -> PullReport:
        return await self._generator.replica.pull(version)

    @concurrent_endpoint
    async def pause(self, mode: PauseMode) -> None:
        await self._generator.replica.pause(mode)

    @concurrent_endpoint
    async def resume(self) -> None:
        await self._generator.replica.resume()

    @concurrent_endpoint
    async def sleep(self) -> None:
        await self._generator.replica.sleep()

    @concurrent_endpoint
    async def wake_up(self) -> None:
        await self._generator.replica.wake_up()

    @concurrent_endpoint
    async def discard_before(self, version: int) -> None:
        self._generator.staging.discard_before(version)

    @concurrent_endpoint
    async def stats(self) -> EngineStats:
        return await self._generator.replica.stats()

    @concurrent_endpoint
    async def close(self) -> None:
        await self._generator.close()


class MonarchReplica:
    """A replica behind Monarch; see `Replica`. Errors arrive as this package's own."""

    def __init__(self, group: ProcessGroup, mesh: ProcessMesh, spec: GeneratorSpec) -> None:
        self._group = group
        self._mesh = mesh
        self._spec = spec
        self._ranks = mesh.spawn("generator", GeneratorActor, spec)
        self._leader = self._ranks.slice(ranks=0)
        self._closing: asyncio.Task[None] | None = None
        # The router holds the deadlines of requests.
        self._exchange = Exchange(
            self.name,
            submit=lambda batch: call(
                self._leader.submit.call_one(batch), what=f"{self.name}: submission"
            ),
            collect=lambda: call(
                self._leader.collect.call_one(),
                what=f"news of {self.name}",
                # A process that is silent for so long is as good as dead.
                timeout_s=2 * spec.generator.stall_timeout_s,
            ),
        )

    @classmethod
    async def spawn(
        cls, group: ProcessGroup, spec: GeneratorSpec, engine_environment: Mapping[str, str]
    ) -> MonarchReplica:
        """Start the processes; `start` then builds the engine in them."""
        environment = process_environment(group) | dict(engine_environment)
        mesh = await spawn_processes(group, environment, log_dir=spec.log_dir)
        return cls(group, mesh, spec)

    @property
    def name(self) -> str:
        return self._group.name

    async def hosts(self) -> list[str]:
        """Where its ranks run."""
        answers = await call(
            self._ranks.host.call(), what=f"host of {self.name}", timeout_s=_QUICK_CALL_S
        )
        return list(answers.values())

    async def start(self) -> None:
        await call(
            self._ranks.start.call(),
            what=f"start of {self.name}",
            timeout_s=self._spec.generator.start_timeout_s,
        )

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        return await self._exchange.generate(request, on_progress, streams=streams)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        await self._exchange.abort(request_ids)

    async def stage(self, handle: WeightHandle) -> None:
        await call(
            self._ranks.stage.call(handle), what=f"{self.name}: fetch of version {handle.version}"
        )

    async def pull(self, version: int) -> PullReport:
        report = await call(
            self._leader.pull.call_one(version), what=f"{self.name}: pull of version {version}"
        )
        await call(self._ranks.discard_before.call(version), what=f"{self.name}: discard")
        return report

    async def pause(self, mode: PauseMode) -> None:
        await call(self._leader.pause.call_one(mode), what=f"{self.name}: pause by {mode}")

    async def resume(self) -> None:
        await call(
            self._leader.resume.call_one(), what=f"resume of {self.name}", timeout_s=_QUICK_CALL_S
        )

    async def read(self, on_reading: OnReading | None = None) -> EngineReading:
        return await self._exchange.read(on_reading)

    async def sleep(self) -> None:
        await call(self._leader.sleep.call_one(), what=f"sleep of {self.name}")

    async def wake_up(self) -> None:
        await call(self._leader.wake_up.call_one(), what=f"wake-up of {self.name}")

    async def stats(self) -> EngineStats:
        self._exchange.require_replica()  # its process may answer all the same
        return await call(
            self._leader.stats.call_one(), what=f"stats of {self.name}", timeout_s=_QUICK_CALL_S
        )

    async def close(self) -> None:
        """End the loop, then the processes in any case; who calls again waits for the same."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close of {self.name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        timeout_s = _LOST_CLOSE_S if self._exchange.is_lost else _QUICK_CALL_S
        try:
            await call(self._ranks.close.call(), what=f"close of {self.name}", timeout_s=timeout_s)
        except (ProcessLostError, DeadlineError, WeightSyncError):
            pass  # the processes end below, whatever state they are in
        finally:
            await self._exchange.close()
            await stop_processes(self._mesh)
