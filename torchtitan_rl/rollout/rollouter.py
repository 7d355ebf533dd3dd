"""Groups of sibling rollouts: run at once, score, and hand on.

A rollout does not know its siblings: one that fails has a status and a cause, and the others go
on. Each is scored, and reported to ``on_rollout``, as soon as it ends; only a rubric that scores
groups makes it wait for the last sibling. Limits are enforced in `rollout_run.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchtitan_rl.config import RolloutConfig
from torchtitan_rl.rollout.rollout_run import (
    EnvironmentFactory,
    Phase,
    RolloutActivity,
    RolloutRun,
)
from torchtitan_rl.rollout.rubric import (
    Rubric,
    environment_score,
    score_whole_group,
    with_score,
)
from torchtitan_rl.types import GenerateFn, Problem, Rollout, RolloutGroup, RolloutStatus

OnRollout = Callable[[Rollout], None]


class Rollouter:
    """Runs groups; any number at once, on one event loop.

    ``environment`` is called on the event loop and must be quick; slow set-up belongs into the
    environment's ``reset``. Without a ``rubric`` the environment's reward is the rollout's.
    """

    def __init__(
        self,
        *,
        generate: GenerateFn,
        environment: EnvironmentFactory,
        config: RolloutConfig,
        rubric: Rubric | None = None,
    ) -> None:
        self._generate = generate
        self._environment = environment
        self._config = config
        self._rubric = rubric
        self._running: dict[str, RolloutRun] = {}

    def activities(self) -> list[RolloutActivity]:
        """What each unfinished rollout waits for, for whoever reports a wait that is too long."""
        return [run.activity for run in self._running.values()]

    async def run_group(
        self,
        group_id: str,
        problem: Problem,
        *,
        size: int,
        seed: int,
        temperature: float | None = None,
        on_rollout: OnRollout | None = None,
    ) -> RolloutGroup:
        """Roll one problem out ``size`` times; siblings are ``{group_id}/r0``, ``/r1``, ...

        ``seed`` is the run's; each request's own follows from it, the rollout and the turn.
        ``temperature`` replaces the configured one (validation). ``on_rollout`` is called once for
        each sibling, with its final status and reward; with CANCELLED where this call is cancelled.

        Raises:
            asyncio.CancelledError: cancelled from outside; all environments are closed by then.
        """
        runs = [
            RolloutRun(
                rollout_id=f"{group_id}/r{i}",
                group_id=group_id,
                problem=problem,
                environment=self._environment,
                generate=self._generate,
                config=self._config,
                seed=seed,
                temperature=self._config.sampling.temperature
                if temperature is None
                else temperature,
            )
            for i in range(size)
        ]
        unreported = {run.rollout_id: run for run in runs}
        self._running |= unreported

        def report(rollout: Rollout) -> None:
            del unreported[rollout.rollout_id]
            self._running.pop(rollout.rollout_id)
            if on_rollout is not None:
                on_rollout(rollout)

        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [siblings.create_task(self._run_one(run, problem, report)) for run in runs]
            rollouts = [task.result() for task in tasks]
            if self._rubric is not None and self._rubric.scores_groups:
                rollouts = await self._score_together(self._rubric, rollouts, runs, problem)
                for rollout in rollouts:
                    report(rollout)
        except asyncio.CancelledError:
            for run in list(unreported.values()):
                report(run.so_far(RolloutStatus.CANCELLED))
            raise
        finally:
            for rollout_id in unreported:
                self._running.pop(rollout_id, None)
        return RolloutGroup(group_id=group_id, problem=problem, rollouts=tuple(rollouts))

    async def _run_one(self, run: RolloutRun, problem: Problem, report: OnRollout) -> Rollout:
        """Run one sibling and, where it is scored alone, score and report it."""
        rollout = await run.run()
        if self._rubric is not None and self._rubric.scores_groups:
            return rollout
        rollout = await self._score(run, rollout, problem)
        report(rollout)
        return rollout

    async def _score(self, run: RolloutRun, rollout: Rollout, problem: Problem) -> Rollout:
        if rollout.status.is_failure:
            return rollout
        if self._rubric is None:
            return with_score(rollout, environment_score(rollout))
        run.enter(Phase.REWARD, "rubric")
        return with_score(rollout, await self._rubric.score(rollout, problem))

    async def _score_together(
        self, rubric: Rubric, rollouts: list[Rollout], runs: list[RolloutRun], problem: Problem
    ) -> list[Rollout]:
        for run in runs:
            run.enter(Phase.REWARD, "score_group")
        return await score_whole_group(rubric, rollouts, problem)
