"""Whose turn it is: what replicas do while the trainer takes a step.

- `BESIDE`: they go on.
- `ABORTED`: their engines are emptied, and what was running goes on under the new weights.
- `ASLEEP`: the same, and they give their devices to the trainer; trainer and replicas compute in
  turns on the same devices.

Invariants: from the moment a step begins until the trainer lets go, emptied engines stay empty,
whatever weights are brought to them meanwhile. Where they are `ASLEEP` no replica steps in that
time, and only then the trainer's state is on the devices; a change of turns is never begun while
another is under way, nor within a pull.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

from torchtitan_rl.orchestration.config import ScheduleConfig
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.trainer import Trainer
from torchtitan_rl.routing.router import GeneratorRouter


class DuringStep(StrEnum):
    """What replicas do while the trainer takes a step."""

    RUNNING = "beside"
    ABORTED = "aborted"
    ASLEEP = "asleep"


def during_step(schedule: ScheduleConfig, *, is_colocated: bool) -> DuringStep:
    """Replicas on shared devices always sleep, whatever ``schedule.in_flight`` says."""
    if is_colocated:
        return DuringStep.ASLEEP
    return DuringStep.ABORTED if schedule.in_flight == "aborted" else DuringStep.RUNNING


class DeviceSharing:
    """The consumer takes the trainer's turn and lets go of it; the weight feed gives the replicas
    theirs. The run begins with the replicas'."""

    def __init__(
        self,
        during_step: DuringStep,
        state: RunState,
        *,
        router: GeneratorRouter,
        trainer: Trainer,
        recorder: Recorder,
    ) -> None:
        self._during_step = during_step
        self._state = state
        self._router = router
        self._trainer = trainer
        self._recorder = recorder
        self._change = asyncio.Lock()
        self._is_trainers = False
        self._is_let_go = True
        self._engines_are_empty = False
        self._switch_s = 0.0

    @property
    def devices_are_shared(self) -> bool:
        return self._during_step is DuringStep.ASLEEP

    @property
    def is_trainers(self) -> bool:
        """The shared devices are the trainer's, who has not let go of them."""
        return self._is_trainers and not self._is_let_go

    @property
    def trainer_is_ready(self) -> bool:
        """It can save: on shared devices a step without an update leaves them to the replicas."""
        return self.is_trainers or not self.devices_are_shared

    @property
    def engines_are_empty(self) -> bool:
        """Requests that run have no part on any engine, and get none before the next weights."""
        return self._engines_are_empty

    def take_switch_s(self) -> float:
        """Seconds for which nobody had the shared devices, since this was last asked."""
        seconds, self._switch_s = self._switch_s, 0.0
        return seconds

    async def to_trainer(self) -> None:
        """The trainer is about to take a step.

        Raises:
            TrainerLostError: a process of the trainer died.
        """
        if self._during_step is DuringStep.ABORTED:
            self._is_let_go = False
            async with self._change:
                # Evaluation goes on, so that its seeded answers do not depend on the moment.
                await self._router.pause("abort", pinned=False)
                self._engines_are_empty = True
        await self.take_devices()

    async def take_devices(self) -> None:
        """The trainer is to have its state on the devices, where it shares them; waits for a change
        of turns that is under way.

        Raises:
            TrainerLostError: a process of the trainer died.
        """
        if not self.devices_are_shared:
            return
        # Said before the wait, so that a change to the replicas gives way.
        self._is_let_go = False
        with self._recorder.phase("switch"), self._state.waits.on("the trainer waits for devices"):
            async with self._change:
                if self._is_trainers:
                    await self._trainer.onload()  # where a change to the replicas failed half-way
                    return
                started_s = time.monotonic()
                self._is_trainers = self._engines_are_empty = True
                await self._router.sleep()
                await self._trainer.onload()
                self._switch_s += time.monotonic() - started_s

    def let_go(self) -> None:
        """The trainer has done what it had to do for now."""
        if not self._is_let_go:
            self._is_let_go = True
            self._state.changed()

    async def until_let_go(self) -> None:
        """Wait until the replicas may have their turn."""
        await self._state.until(
            lambda: self._is_let_go, "new weights wait for the trainer to leave the devices"
        )

    @asynccontextmanager
    async def to_replicas(self) -> AsyncIterator[None]:
        """Bring new weights to the replicas inside; they go on when it is left without an error,
        unless another step has begun meanwhile, after which this is called again."""
        if not self.devices_are_shared:
            yield
            if self._during_step is DuringStep.ABORTED:
                async with self._change:
                    if self._is_let_go:
                        await self._router.resume()
                        self._engines_are_empty = False
            return
        while True:
            await self.until_let_go()
            async with self._change:
                if not self._is_let_go:
                    continue
                if self._is_trainers:
                    await self._wake_up()
                yield
                await self._router.resume()
                self._engines_are_empty = False
                return

    async def _wake_up(self) -> None:
        with self._recorder.phase("switch"):
            started_s = time.monotonic()
            await self._trainer.offload()
            await self._router.wake_up()
            self._is_trainers = False
            self._switch_s += time.monotonic() - started_s
