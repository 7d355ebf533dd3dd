"""Evaluation alongside training: fixed problems and seeds, on one pinned policy version.

Invariants: all tokens of an evaluation are of one version. Training does not wait for it, except
where both need the same replica or devices. An evaluation whose replica dies is repeated once on
another one.
"""

from __future__ import annotations

import asyncio
import time

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.orchestration.config import ControllerConfig
from torchtitan_rl.orchestration.records import EvaluationRecord
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.routing.pinned_replica import PinnedReplica
from torchtitan_rl.routing.replica import ReplicaState
from torchtitan_rl.tasks import BackgroundTask
from torchtitan_rl.types import RolloutGroup


class Evaluator:
    """Runs evaluations in the background, one after another."""

    def __init__(self, config: ControllerConfig, state: RunState) -> None:
        self._config = config
        self._success_reward = config.task.success_reward()
        self._state = state
        self._problems = tuple(state.parts.evaluation_problems)
        self._running = BackgroundTask()
        self._is_pinned = False

    def is_due(self, step: int) -> bool:
        if not self._problems or self._state.evaluated_step == step:
            return False
        every = self._config.evaluation.every
        return step in (0, self._config.num_steps) or (every > 0 and step % every == 0)

    @property
    def is_running(self) -> bool:
        return self._running.is_running

    async def start(self, step: int) -> None:
        """Pin a replica at the version it holds now and evaluate that version in the background.

        Returns when the replica is pinned. Waits for a running evaluation and for a free replica.
        """
        await self.finish()
        self._is_pinned = False
        task = self._running.start(f"evaluation {step}", self._run, step)
        task.add_done_callback(lambda _: self._state.notify())
        await self._state.wait_until(
            lambda: self._is_pinned or task.done(),
            f"the evaluation after step {step} waits for a replica",
        )
        if task.done():
            await self.finish()

    async def finish(self) -> None:
        """Wait for the running evaluation, if there is one, and raise its error."""
        with self._state.waits.track("an evaluation has to end first"):
            await self._running.wait()

    async def close(self) -> None:
        """Cancel the running evaluation."""
        await self._running.close()

    async def _run(self, step: int) -> None:
        router, recorder = self._state.parts.router, self._state.recorder
        groups: tuple[RolloutGroup, ...] = ()
        for is_retry in (False, True):
            started_s = time.monotonic()
            async with router.pin() as pin:
                self._is_pinned = True
                self._state.notify()
                with recorder.phase("evaluation"):
                    groups = await self._roll_out(pin)
            if router.states()[pin.replica] is not ReplicaState.DEAD:
                break
            if is_retry:
                raise GenerationError(f"the evaluation after step {step} lost two replicas")
            recorder.say(f"the evaluation after step {step} lost {pin.replica}: it is repeated")
        recorder.record_evaluation(
            EvaluationRecord(
                step=step,
                version=pin.version,
                groups=groups,
                seconds=time.monotonic() - started_s,
                success_reward=self._success_reward,
            )
        )
        self._state.evaluated_step = step
        self._state.notify()

    async def _roll_out(self, pin: PinnedReplica) -> tuple[RolloutGroup, ...]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    self._state.parts.rollouter.run_group(
                        f"validation/{problem.problem_id}",
                        problem,
                        size=self._config.evaluation.samples_per_problem,
                        seed=self._config.seed,
                        temperature=self._config.evaluation.temperature,
                        generate=pin.generate,
                        active_time=pin.active_time,
                    )
                )
                for problem in self._problems
            ]
        return tuple(task.result() for task in running)
