"""Loads each published version into the replicas while the next step runs, and starts evaluations.
Also decides who uses devices that the trainer and the replicas share.

| mode | replicas during a step | after the step |
|---|---|---|
| ``continue`` | keep running | they pull the new weights |
| ``pause`` | requests are interrupted | requests go on, in general under the new weights |
| ``sleep`` | like ``pause``, and replicas free the devices | the trainer offloads, they wake up |

``pause`` and ``continue`` are ``schedule.during_training``; on shared devices, replicas ``sleep``.

Invariants of `WeightDelivery`: evaluations are pinned in the order of their steps. A version is
skipped only if a newer one is already queued and no evaluation needs the version. A skipped version
is released.

Invariants of `DeviceSharing`: from the moment a step begins until the trainer releases the devices,
emptied engines stay empty, even if they pull weights in this time. With ``sleep`` no replica steps
in this time, and the trainer's state is on the devices only in this time. Only one switch runs at a
time, and none during a pull.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from torchtitan_rl.aio import background, loop_s, uninterrupted
from torchtitan_rl.orchestration.config import ControllerConfig
from torchtitan_rl.orchestration.evaluation import Evaluator
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.routing.weights import SyncReport
from torchtitan_rl.weights.config import WeightSyncConfig
from torchtitan_rl.weights.distribution import WeightHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """A finished step, with the weights after it: their ``version`` and ``handle``. ``handle`` is
    None if the step had nothing to train on, so that the weights did not change."""

    step: int
    version: int
    handle: WeightHandle | None


@dataclass(eq=False)
class WeightDelivery:
    """The queue of finished steps between trainer and replicas, and the loop that empties it."""

    config: WeightSyncConfig
    state: RunState
    _: KW_ONLY
    evaluator: Evaluator
    devices: DeviceSharing

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[PublishedStep] = asyncio.Queue()
        self._last_put = -1  # number of the newest queued step
        self._num_open = 1  # queued and running steps, and the evaluation before the first step
        self._has_failed = False
        self._needed: dict[int, PublishedStep] = {}  # by version: the last step that needs it
        self._initial: PublishedStep | None = None  # the weights with which a resumed run begins
        self._newest: PublishedStep | None = None  # the newest with a handle, until its sync begins
        self._syncs: list[SyncReport] = []

    @property
    def needed_versions(self) -> frozenset[int]:
        """The published versions that replicas still have to read, and that must stay readable."""
        return frozenset(self._needed)

    @property
    def is_idle(self) -> bool:
        """Whether every queued step is done, and no evaluation runs."""
        return self._num_open == 0 and not self.evaluator.is_running

    def pop_syncs(self) -> tuple[SyncReport, ...]:
        """Return the reports of the syncs that ended since the last call."""
        syncs, self._syncs = tuple(self._syncs), []
        return syncs

    def needs_evaluation(self, step: int) -> bool:
        return self.evaluator.is_due(step)

    def put(self, step: PublishedStep) -> None:
        """Queue a step whose weights, if any, have just been published."""
        self._num_open += 1
        self._last_put = step.step
        if step.handle is None and self._newest is not None and self.needs_evaluation(step.step):
            step = replace(step, handle=self._newest.handle)  # this handle has not been synced yet
        if step.handle is not None:
            self._needed[step.handle.version] = step
            if self._newest is not None and not self.needs_evaluation(self._newest.step):
                self._release(self._newest)
            self._newest = step
        self._queue.put_nowait(step)

    async def resume(self, handle: WeightHandle) -> None:
        """Load the weights with which a resumed run begins into the replicas. They stay readable
        until the evaluation of their step, if one is due, has pinned its replica."""
        self._initial = PublishedStep(step=self.state.step, version=handle.version, handle=handle)
        self._needed[handle.version] = self._initial
        await self._sync(handle)

    async def run(self) -> None:
        """Deliver one queued step after another, until cancelled. Raises WeightSyncError: no
        replica is left."""
        try:
            # A step that was taken before this task began is in the queue, and is evaluated later.
            step = self.state.step
            if step != self._last_put and self.evaluator.is_due(step):
                await self._evaluate(step, self.state.version)
            if self._initial is not None:
                self._release(self._initial)
            while True:
                self._num_open -= 1
                self.state.notify()
                await self._deliver(await self._queue.get())
        except BaseException:
            self._has_failed = True
            self.state.notify()
            raise

    async def flush(self) -> None:
        """Wait until every queued step is done and every evaluation has ended, or `run` failed."""
        await self.state.wait_until(
            lambda: self._num_open == 0 or self._has_failed,
            "the end waits for the last weights to reach the replicas",
        )
        await self.evaluator.finish()

    async def _deliver(self, finished: PublishedStep) -> None:
        await self.devices.wait_until_released()
        needs_evaluation = self.needs_evaluation(finished.step)
        is_newest = finished is self._newest
        if finished.handle is not None and (needs_evaluation or is_newest):
            if is_newest:
                self._newest = None
            self._syncs.append(await self._sync(finished.handle))
        if needs_evaluation:
            await self._evaluate(finished.step, finished.version)
        self._release(finished)

    async def _evaluate(self, step: int, version: int) -> None:
        async with background(self.devices.resume_when_released()):
            await self.evaluator.start(step, version)

    def _release(self, finished: PublishedStep) -> None:
        self._needed = {v: step for v, step in self._needed.items() if step is not finished}

    async def _sync(self, handle: WeightHandle) -> SyncReport:
        # On shared devices a lagging replica would be put to sleep with half-pulled weights.
        lag_timeout_s = None if self.devices.devices_are_shared else self.config.lag_timeout_s
        waiting = f"version {handle.version} waits for the replicas to pull it"
        with self.state.recorder.phase("sync"), self.state.waits.track(waiting):
            async with self.devices.to_replicas():
                report = await self.state.parts.router.sync_weights(
                    handle,
                    mode=self.config.mode,
                    order=self.config.order,
                    lag_timeout_s=lag_timeout_s,
                )
        self.state.notify()
        return report


DuringStep = Literal["continue", "pause", "sleep"]
"""How replicas behave while the trainer takes a step."""


def during_step(config: ControllerConfig) -> DuringStep:
    return "sleep" if config.placement == "colocated" else config.schedule.during_training


class DeviceSharing:
    """Decides who uses shared devices. At first the replicas use them. The consumer takes the
    devices for the trainer and releases them; `WeightDelivery` then gives them to the replicas."""

    def __init__(self, during_step: DuringStep, state: RunState) -> None:
        self._during_step = during_step
        self._state = state
        self._router = state.parts.router
        self._trainer = state.parts.trainer
        self._switching = asyncio.Lock()
        self._trainer_is_loaded = False
        self._is_released = True
        self.engines_are_empty = False  # no request runs, and none will before a resume
        self._switch_s = 0.0

    @property
    def devices_are_shared(self) -> bool:
        return self._during_step == "sleep"

    @property
    def trainer_holds_devices(self) -> bool:
        """Whether the trainer has the shared devices and has not released them."""
        return self._trainer_is_loaded and not self._is_released

    @property
    def trainer_can_save(self) -> bool:
        """Whether the trainer can save. On shared devices the trainer cannot save after a step
        without an update, because the replicas still have the devices."""
        return self.trainer_holds_devices or not self.devices_are_shared

    def pop_switch_s(self) -> float:
        """Return the seconds spent on switching devices since the last call."""
        seconds, self._switch_s = self._switch_s, 0.0
        return seconds

    async def prepare_step(self) -> None:
        """Prepare the replicas for a step of the trainer."""
        if self._during_step == "pause":
            self._is_released = False
            async with self._switching:
                # Evaluations continue, so that their seeded answers do not depend on timing.
                await self._router.pause("abort", pinned=False)
                self.engines_are_empty = True
        await self.take_devices()

    async def take_devices(self) -> None:
        """If devices are shared, put the replicas to sleep and load the trainer's state."""
        if not self.devices_are_shared:
            return
        self._is_released = False  # before the lock, so that a waiting `to_replicas` gives way
        with (
            self._state.recorder.phase("switch"),
            self._state.waits.track("the trainer waits for devices"),
        ):
            async with self._switching:
                if self._trainer_is_loaded:
                    # An earlier switch to the replicas may have failed after offloading.
                    await self._trainer.onload()
                    return
                self._trainer_is_loaded = self.engines_are_empty = True
                with self._timed():
                    await self._router.sleep()
                    await self._trainer.onload()

    def release(self) -> None:
        """Declare that the trainer does not need the devices for now."""
        if not self._is_released:
            self._is_released = True
            self._state.notify()

    async def wait_until_released(self) -> None:
        await self._state.wait_until(
            lambda: self._is_released, "new weights wait for the trainer to leave the devices"
        )

    async def resume_when_released(self) -> None:
        """With ``pause``: whenever the trainer is done, let the replicas' requests continue under
        the weights that they have. While an evaluation waits for a replica, no newer weights come,
        and a replica that takes the place of a lost one joins only while replicas are not paused.
        Runs until it is cancelled."""
        while self._during_step == "pause":
            await self._state.wait_until(
                lambda: self._is_released and self.engines_are_empty,
                "replicas wait for the trainer or for new weights",
            )
            await uninterrupted(self._resume_if_released())

    @asynccontextmanager
    async def to_replicas(self) -> AsyncIterator[None]:
        """Run the block, which loads new weights into the replicas. After the block, the replicas'
        requests continue.

        If another step begins before the end of the block, or the block raises, the engines stay
        paused until the next call.
        """
        if not self.devices_are_shared:
            yield
            if self._during_step == "pause":
                await self._resume_if_released()
            return
        while True:
            await self.wait_until_released()
            async with self._switching:
                if not self._is_released:
                    continue
                if self._trainer_is_loaded:
                    await self._wake_up()
                yield
                await self._resume_engines()
                return

    async def _resume_if_released(self) -> None:
        async with self._switching:
            if self._is_released:
                await self._resume_engines()

    async def _resume_engines(self) -> None:
        await self._router.resume()
        self.engines_are_empty = False

    async def _wake_up(self) -> None:
        with self._state.recorder.phase("switch"), self._timed():
            await self._trainer.offload()
            await self._router.wake_up()
            self._trainer_is_loaded = False

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started_s = loop_s()
        yield
        self._switch_s += loop_s() - started_s
