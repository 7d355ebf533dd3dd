"""Evaluation alongside training: fixed problems and seeds, on one pinned policy version.

Invariants: all tokens of an evaluation have one version. Training does not wait for an evaluation,
unless both need the same replica or devices. If its replica dies, it is repeated on another one
with the same version; if there is none, it is skipped, with a line on the console.
"""

from __future__ import annotations

from torchtitan_rl.aio import BackgroundTask, loop_s
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.orchestration.config import ControllerConfig
from torchtitan_rl.orchestration.records import EvaluationRecord
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.rollout.rollouter import roll_out_problems
from torchtitan_rl.routing.pausing import PinnedReplica
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.types import Rollout, RolloutGroup


class Evaluator:
    """Runs evaluations in the background, one after another."""

    def __init__(self, config: ControllerConfig, state: RunState) -> None:
        self._config = config
        self._success_reward = config.task.success_reward()
        self._state = state
        self._problems = tuple(state.parts.evaluation_problems)
        self._running = BackgroundTask()
        self._is_pinned = False
        self._version = self._num_done = 0  # of the running evaluation

    def is_due(self, step: int) -> bool:
        if not self._problems or self._state.evaluated_step == step:
            return False
        every = self._config.evaluation.every
        return step in (0, self._config.num_steps) or (every > 0 and step % every == 0)

    @property
    def is_running(self) -> bool:
        return self._running.is_running

    def progress(self) -> dict[str, int] | None:
        """Version and number of rollouts of the running evaluation."""
        if not self.is_running:
            return None
        total = len(self._problems) * self._config.evaluation.samples_per_problem
        return {"version": self._version, "done": self._num_done, "total": total}

    async def start(self, step: int, version: int) -> None:
        """Pin a replica that holds ``version``, the step's, and evaluate in the background. Waits
        for a running evaluation and for a free replica."""
        await self.finish()
        self._is_pinned = False
        task = self._running.start(f"evaluation {step}", self._run, step, version)
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

    async def _run(self, step: int, version: int) -> None:
        """Evaluate. Whenever the replica dies meanwhile, evaluate again on another replica."""
        recorder = self._state.recorder
        while True:
            num_lost = self._num_lost()
            try:
                async with self._state.parts.router.pin(version) as pin:
                    if pin.version != version:
                        why = f"no replica holds version {version} any more"
                        recorder.say(f"NO EVALUATION after step {step}: {why}")
                        return
                    self._is_pinned = True
                    self._state.notify()
                    started_s = loop_s()
                    with recorder.phase("evaluation"):
                        groups = await self._roll_out(pin)
            except WeightSyncError:  # the reserved replica could not pull the weights
                if self._num_lost() == num_lost:
                    raise
            else:
                if self._state.parts.router.states().get(pin.replica) is not Phase.DEAD:
                    break
            recorder.say(f"the evaluation after step {step} lost its replica: it is repeated")
        recorder.record_evaluation(
            EvaluationRecord(
                step=step,
                version=version,
                groups=groups,
                seconds=loop_s() - started_s,
                success_reward=self._success_reward,
            )
        )
        self._state.evaluated_step = step
        self._state.notify()

    def _num_lost(self) -> int:
        states = self._state.parts.router.states().values()
        return sum(state is Phase.DEAD for state in states)

    async def _roll_out(self, pin: PinnedReplica) -> tuple[RolloutGroup, ...]:
        evaluation = self._config.evaluation
        self._version, self._num_done = pin.version, 0

        def count(_: Rollout) -> None:
            self._num_done += 1

        return await roll_out_problems(
            self._state.parts.rollouter,
            self._problems,
            samples=evaluation.samples_per_problem,
            seed=self._config.seed,
            temperature=evaluation.temperature,
            generate=pin.generate,
            active_time=pin.active_time,
            on_rollout=count,
        )
