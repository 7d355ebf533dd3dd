"""Evaluation beside training: the same problems, with the same seeds, on one pinned version.

Invariants: all tokens of an evaluation are of one version; training does not wait for it beyond
what sharing a replica means; one that lost its replica is done again on another, once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.orchestration.records import EvaluationRecord, Recorder
from torchtitan_rl.orchestration.rows import Rows
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.pinned_replica import PinnedReplica
from torchtitan_rl.routing.replica import ReplicaState
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Problem, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """``every`` counts steps; 0 evaluates only before the first and after the last."""

    every: int
    num_steps: int
    samples: int
    temperature: float
    seed: int
    success_reward: float


class Evaluator:
    """Evaluations run in the background, one after another."""

    def __init__(
        self,
        settings: EvaluationSettings,
        state: RunState,
        *,
        problems: Sequence[Problem],
        rollouter: Rollouter,
        router: GeneratorRouter,
        rows: Rows,
        recorder: Recorder,
    ) -> None:
        self._settings = settings
        self._state = state
        self._problems = tuple(problems)
        self._rollouter = rollouter
        self._router = router
        self._rows = rows
        self._recorder = recorder
        self._running: asyncio.Task[None] | None = None

    def is_due(self, step: int) -> bool:
        if not self._problems or self._state.evaluated_step == step:
            return False
        every = self._settings.every
        return step in (0, self._settings.num_steps) or (every > 0 and step % every == 0)

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    async def start(self, step: int) -> None:
        """Pin a replica at its version of now and evaluate it in the background.

        Waits for an evaluation that still runs, and for a replica that is free.
        """
        await self.finish()
        pinned = asyncio.Event()
        self._running = asyncio.create_task(self._run(step, pinned), name=f"evaluation {step}")
        self._running.add_done_callback(lambda _: self._state.changed())
        pinning = asyncio.create_task(pinned.wait())
        try:
            with self._state.waits.on(f"the evaluation after step {step} waits for a replica"):
                await asyncio.wait({self._running, pinning}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pinning.cancel()
        if self._running.done():
            await self.finish()

    async def finish(self) -> None:
        """Wait for the evaluation that runs, if one does; raises what it raised."""
        if self._running is None:
            return
        with self._state.waits.on("an evaluation has to end first"):
            await self._running
        self._running = None

    async def close(self) -> None:
        """Give up the evaluation that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _run(self, step: int, pinned: asyncio.Event) -> None:
        groups: tuple[RolloutGroup, ...] = ()
        for is_retry in (False, True):
            started = time.monotonic()
            async with self._router.pin() as pin:
                pinned.set()
                with self._recorder.phase("evaluation"):
                    groups = await self._roll_out(pin)
            if self._router.states()[pin.replica] is not ReplicaState.DEAD:
                break
            if is_retry:
                raise GenerationError(f"the evaluation after step {step} lost two replicas")
            self._recorder.say(f"the evaluation after step {step} lost {pin.replica}: once more")
        self._rows.evaluation(
            EvaluationRecord(
                step=step,
                version=pin.version,
                groups=groups,
                seconds=time.monotonic() - started,
                success_reward=self._settings.success_reward,
            )
        )
        self._state.evaluated_step = step
        self._state.changed()

    async def _roll_out(self, pin: PinnedReplica) -> tuple[RolloutGroup, ...]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    self._rollouter.run_group(
                        f"validation/{problem.problem_id}",
                        problem,
                        size=self._settings.samples,
                        seed=self._settings.seed,
                        temperature=self._settings.temperature,
                        generate=pin.generate,
                        active_time=pin.active_time,
                    )
                )
                for problem in self._problems
            ]
        return tuple(task.result() for task in running)
