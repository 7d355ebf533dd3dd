"""Brings each published version to the replicas while the next step runs, and starts evaluations.

Invariant: evaluations are pinned in order of their steps. A version is passed over only where a
newer one waits already and no evaluation needs it; it is given up at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_rl.orchestration.device_sharing import DeviceSharing
from torchtitan_rl.orchestration.evaluation import Evaluator
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.routing.weight_sync import SyncMode, SyncOrder, SyncReport
from torchtitan_rl.weights.handle import WeightHandle
from torchtitan_rl.weights.published import PublishedVersions


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings:
    mode: SyncMode
    order: SyncOrder
    lag_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """``handle`` is None where the step had nothing to train on."""

    step: int
    handle: WeightHandle | None


class WeightFeed:
    """A queue between trainer and replicas, and the loop behind it."""

    def __init__(
        self,
        settings: FeedSettings,
        state: RunState,
        *,
        router: GeneratorRouter,
        evaluator: Evaluator,
        devices: DeviceSharing,
        recorder: Recorder,
    ) -> None:
        self._settings = settings
        self._state = state
        self._router = router
        self._evaluator = evaluator
        self._devices = devices
        self._recorder = recorder
        self._queue: asyncio.Queue[FinishedStep] = asyncio.Queue()
        self._unfinished = 1  # steps, and the evaluation before the first
        self._has_failed = False
        self._lost_replicas: set[str] = set()
        self._published = PublishedVersions()
        self._releases: dict[int, Callable[[], None]] = {}  # of queued versions
        self._begins_with: FinishedStep | None = None
        self._queued: FinishedStep | None = None  # the newest with a handle, until it is synced
        self._syncs: list[SyncReport] = []  # since they were last taken

    @property
    def needed_versions(self) -> frozenset[int]:
        """Published versions that replicas have not been brought to; keep them readable."""
        return self._published.kept()

    @property
    def is_idle(self) -> bool:
        """Every step that was put is closed, and no evaluation runs."""
        return self._unfinished == 0 and not self._evaluator.is_running

    def take_syncs(self) -> tuple[SyncReport, ...]:
        """Reports of the syncs that ended since this was last asked."""
        syncs, self._syncs = tuple(self._syncs), []
        return syncs

    def is_evaluated(self, step: int) -> bool:
        return self._evaluator.is_due(step)

    def put(self, step: FinishedStep) -> None:
        """Queue a step whose weights, if any, have just been published."""
        self._unfinished += 1
        if step.handle is not None:
            self._keep_readable(step.handle)
            if self._queued is not None and not self.is_evaluated(self._queued.step):
                self._release(self._queued)
            self._queued = step
        self._queue.put_nowait(step)

    async def resume(self, handle: WeightHandle) -> None:
        """Bring the weights that a resumed run begins with to the replicas.

        They stay readable until the evaluation of their step, if it is due, has its replica.
        """
        self._keep_readable(handle)
        self._begins_with = FinishedStep(step=self._state.step, handle=handle)
        await self.sync(handle)

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            WeightSyncError: no replica is left.
        """
        try:
            if self._evaluator.is_due(self._state.step):
                await self._evaluator.start(self._state.step)
            if self._begins_with is not None:
                self._release(self._begins_with)
            while True:
                self._unfinished -= 1
                self._state.changed()
                await self._close_step(await self._queue.get())
        except BaseException:
            self._has_failed = True
            self._state.changed()
            raise

    async def flush(self) -> None:
        """Wait until every step that was put is recorded and every evaluation has ended; or until
        `run` has failed."""
        await self._state.until(
            lambda: self._unfinished == 0 or self._has_failed,
            "the end waits for the last weights to reach the replicas",
        )
        await self._evaluator.finish()

    async def _close_step(self, finished: FinishedStep) -> None:
        await self._devices.until_let_go()
        is_evaluated = self.is_evaluated(finished.step)
        handle = finished.handle
        if handle is not None and (is_evaluated or handle.version == self._published.current):
            if finished is self._queued:
                self._queued = None
            self._syncs.append(await self.sync(handle))
        if is_evaluated:
            await self._evaluator.start(finished.step)
        self._release(finished)

    def _keep_readable(self, handle: WeightHandle) -> None:
        self._published.advance(handle.version)
        self._releases[handle.version] = self._published.pin(handle.version)

    def _release(self, finished: FinishedStep) -> None:
        """Its version need not stay readable for the replicas any more."""
        if finished.handle is not None:
            release = self._releases.pop(finished.handle.version, None)
            if release is not None:
                release()

    async def sync(self, handle: WeightHandle) -> SyncReport:
        """Bring a version to the replicas now."""
        with (
            self._recorder.phase("sync"),
            self._state.waits.on(f"version {handle.version} waits for the replicas to pull it"),
        ):
            async with self._devices.to_replicas():
                report = await self._router.sync_weights(
                    handle,
                    mode=self._settings.mode,
                    order=self._settings.order,
                    lag_timeout_s=self._lag_timeout_s(),
                )
        for name in sorted(set(report.lost) - self._lost_replicas):
            self._recorder.say(f"{name} is lost; the others go on")
        self._lost_replicas.update(report.lost)
        self._state.changed()
        return report

    def _lag_timeout_s(self) -> float | None:
        # On shared devices one that lags would be put to sleep with weights half pulled.
        return None if self._devices.devices_are_shared else self._settings.lag_timeout_s
