"""Brings each published version to the replicas while the next step runs, and starts evaluations.

Invariants: evaluations are pinned in the order of their steps. A version is skipped only when a
newer one is queued already and no evaluation needs it; it is then released at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from torchtitan_rl.orchestration.device_sharing import DeviceSharing
from torchtitan_rl.orchestration.evaluation import Evaluator
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.routing.weights import SyncReport
from torchtitan_rl.weights.config import WeightSyncConfig
from torchtitan_rl.weights.handle import WeightHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """``version`` is that of the weights after the step, and ``handle`` leads to them; None where
    the step had nothing to train on, so that the weights are those of the step before."""

    step: int
    version: int
    handle: WeightHandle | None


class WeightFeed:
    """The queue of finished steps between trainer and replicas, and the loop that empties it."""

    def __init__(
        self,
        config: WeightSyncConfig,
        state: RunState,
        *,
        evaluator: Evaluator,
        devices: DeviceSharing,
    ) -> None:
        self._config = config
        self._state = state
        self._evaluator = evaluator
        self._devices = devices
        self._queue: asyncio.Queue[FinishedStep] = asyncio.Queue()
        self._num_open = 1  # queued and running steps, and the evaluation before the first
        self._has_failed = False
        self._needed: dict[int, FinishedStep] = {}  # by version: the last step that needs it
        self._initial: FinishedStep | None = None  # of a resumed run
        self._newest: FinishedStep | None = None  # the newest with a handle, until its sync begins
        self._syncs: list[SyncReport] = []

    @property
    def needed_versions(self) -> frozenset[int]:
        """Published versions that replicas still have to read: they must stay readable."""
        return frozenset(self._needed)

    @property
    def is_idle(self) -> bool:
        """Every queued step is done, and no evaluation runs."""
        return self._num_open == 0 and not self._evaluator.is_running

    def take_syncs(self) -> tuple[SyncReport, ...]:
        """Reports of the syncs that ended since the last call."""
        syncs, self._syncs = tuple(self._syncs), []
        return syncs

    def needs_evaluation(self, step: int) -> bool:
        """Whether an evaluation of this step is due."""
        return self._evaluator.is_due(step)

    def put(self, step: FinishedStep) -> None:
        """Queue a step whose weights, if any, have just been published."""
        self._num_open += 1
        if step.handle is None and self._newest is not None and self.needs_evaluation(step.step):
            step = replace(step, handle=self._newest.handle)  # it has not been synced yet
        if step.handle is not None:
            self._needed[step.handle.version] = step
            if self._newest is not None and not self.needs_evaluation(self._newest.step):
                self._release(self._newest)
            self._newest = step
        self._queue.put_nowait(step)

    async def resume(self, handle: WeightHandle) -> None:
        """Bring the weights that a resumed run begins with to the replicas.

        They stay readable until the evaluation of their step, if it is due, has its replica.
        """
        self._initial = FinishedStep(step=self._state.step, version=handle.version, handle=handle)
        self._needed[handle.version] = self._initial
        await self._sync(handle)

    async def run(self) -> None:
        """Deal with one queued step after another, until cancelled.

        Raises:
            WeightSyncError: no replica is left.
        """
        try:
            if self._evaluator.is_due(self._state.step):
                await self._evaluator.start(self._state.step, self._state.version)
            if self._initial is not None:
                self._release(self._initial)
            while True:
                self._num_open -= 1
                self._state.notify()
                await self._deliver(await self._queue.get())
        except BaseException:
            self._has_failed = True
            self._state.notify()
            raise

    async def flush(self) -> None:
        """Wait until every queued step is done and every evaluation has ended, or `run` failed."""
        await self._state.wait_until(
            lambda: self._num_open == 0 or self._has_failed,
            "the end waits for the last weights to reach the replicas",
        )
        await self._evaluator.finish()

    async def _deliver(self, finished: FinishedStep) -> None:
        await self._devices.wait_until_released()
        needs_evaluation = self.needs_evaluation(finished.step)
        is_newest = finished is self._newest
        if finished.handle is not None and (needs_evaluation or is_newest):
            if is_newest:
                self._newest = None
            self._syncs.append(await self._sync(finished.handle))
        if needs_evaluation:
            await self._evaluator.start(finished.step, finished.version)
        self._release(finished)

    def _release(self, finished: FinishedStep) -> None:
        self._needed = {v: step for v, step in self._needed.items() if step is not finished}

    async def _sync(self, handle: WeightHandle) -> SyncReport:
        # On shared devices a lagging replica would be put to sleep with half-pulled weights.
        lag_timeout_s = None if self._devices.devices_are_shared else self._config.lag_timeout_s
        waiting = f"version {handle.version} waits for the replicas to pull it"
        with self._state.recorder.phase("sync"), self._state.waits.track(waiting):
            async with self._devices.to_replicas():
                report = await self._state.parts.router.sync_weights(
                    handle,
                    mode=self._config.mode,
                    order=self._config.order,
                    lag_timeout_s=lag_timeout_s,
                )
        self._state.notify()
        return report
