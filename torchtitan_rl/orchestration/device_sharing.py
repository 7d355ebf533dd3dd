"""What replicas do while the trainer takes a step, and who uses shared devices when.

| mode | during a step | after it |
|---|---|---|
| `RUNNING` | replicas keep running | they pull the new weights |
| `ABORTED` | requests are cut, engines are empty | requests continue under the new weights |
| `ASLEEP` | as `ABORTED`, and replicas free the devices | the trainer offloads, replicas wake up |

Invariants: from the moment a step begins until the trainer releases the devices, emptied engines
stay empty, even if weights are brought to them meanwhile. With `ASLEEP` no replica steps in that
time, and the trainer's state is on the devices only then. One switch runs at a time, and none
within a pull.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum

from torchtitan_rl.orchestration.config import ControllerConfig
from torchtitan_rl.orchestration.run_state import RunState


class DuringStep(StrEnum):
    """What replicas do while the trainer takes a step."""

    RUNNING = "running"
    ABORTED = "aborted"
    ASLEEP = "asleep"


def during_step(config: ControllerConfig) -> DuringStep:
    """Replicas on shared devices always sleep, whatever ``schedule.in_flight`` says."""
    is_colocated = config.placement == "colocated"
    return DuringStep.ASLEEP if is_colocated else DuringStep(config.schedule.in_flight)


class DeviceSharing:
    """The consumer takes the devices for the trainer and releases them; the weight feed then hands
    them to the replicas. The replicas have them first."""

    def __init__(self, during_step: DuringStep, state: RunState) -> None:
        self._during_step = during_step
        self._state = state
        self._router = state.parts.router
        self._trainer = state.parts.trainer
        self._switching = asyncio.Lock()
        self._trainer_is_loaded = False
        self._is_released = True
        self._engines_are_empty = False
        self._switch_s = 0.0

    @property
    def devices_are_shared(self) -> bool:
        return self._during_step is DuringStep.ASLEEP

    @property
    def trainer_holds_devices(self) -> bool:
        """The shared devices are the trainer's, and it has not released them."""
        return self._trainer_is_loaded and not self._is_released

    @property
    def trainer_can_save(self) -> bool:
        """False on shared devices after a step without an update: the replicas still have them."""
        return self.trainer_holds_devices or not self.devices_are_shared

    @property
    def engines_are_empty(self) -> bool:
        """No request runs on an engine, and none will before the next weights."""
        return self._engines_are_empty

    def take_switch_s(self) -> float:
        """Seconds spent on switching devices since the last call."""
        seconds, self._switch_s = self._switch_s, 0.0
        return seconds

    async def prepare_step(self) -> None:
        """Make the replicas ready for a step of the trainer."""
        if self._during_step is DuringStep.ABORTED:
            self._is_released = False
            async with self._switching:
                # Evaluations continue, so that their seeded answers do not depend on timing.
                await self._router.pause("abort", pinned=False)
                self._engines_are_empty = True
        await self.take_devices()

    async def take_devices(self) -> None:
        """Where devices are shared: put the replicas to sleep and load the trainer's state."""
        if not self.devices_are_shared:
            return
        self._is_released = False  # before the lock, so that a waiting `to_replicas` gives way
        with (
            self._state.recorder.phase("switch"),
            self._state.waits.track("the trainer waits for devices"),
        ):
            async with self._switching:
                if self._trainer_is_loaded:
                    # A switch to the replicas may have failed after it offloaded.
                    await self._trainer.onload()
                    return
                self._trainer_is_loaded = self._engines_are_empty = True
                with self._timed():
                    await self._router.sleep()
                    await self._trainer.onload()

    def release(self) -> None:
        """The trainer does not need the devices for now."""
        if not self._is_released:
            self._is_released = True
            self._state.notify()

    async def wait_until_released(self) -> None:
        """Wait until the replicas may have the devices."""
        await self._state.wait_until(
            lambda: self._is_released, "new weights wait for the trainer to leave the devices"
        )

    @asynccontextmanager
    async def to_replicas(self) -> AsyncIterator[None]:
        """Bring new weights to the replicas inside the block; afterwards their requests continue.

        If another step begins meanwhile, or the block raises, engines stay as they are until the
        next call.
        """
        if not self.devices_are_shared:
            yield
            if self._during_step is DuringStep.ABORTED:
                async with self._switching:
                    if self._is_released:
                        await self._resume_engines()
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

    async def _resume_engines(self) -> None:
        await self._router.resume()
        self._engines_are_empty = False

    async def _wake_up(self) -> None:
        with self._state.recorder.phase("switch"), self._timed():
            await self._trainer.offload()
            await self._router.wake_up()
            self._trainer_is_loaded = False

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self._switch_s += time.monotonic() - started_s
