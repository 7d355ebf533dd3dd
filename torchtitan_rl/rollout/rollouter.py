"""Groups of sibling rollouts: run at once, score, and hand on.

A rollout does not know its siblings: one that fails has a status and a cause, and the others go
on. Each is scored, and reported to ``on_rollout``, as soon as it ends; only a rubric that scores
groups makes it wait for the last sibling. Limits are enforced in `rollout_run.py`.

A group can be recorded while it runs (`snapshot`, ``on_turn``) and continued by another process
(``recorded``). A sibling that had ended keeps how it ended and is only scored again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.rollout.rollout_run import (
    EnvironmentFactory,
    OnDiscard,
    OnTurn,
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
from torchtitan_rl.routing.active_time import ActiveTime
from torchtitan_rl.types import (
    Completion,
    GenerateFn,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)

OnRollout = Callable[[Rollout], None]


class Rollouter:
    """Runs groups; any number at once, on one event loop.

    ``environment`` is called on the event loop and must be quick; slow set-up belongs into the
    environment's ``reset``. Without a ``rubric`` the environment's reward is the rollout's.
    ``active_time`` (the router's, say) stands still while no rollout can generate.
    """

    def __init__(
        self,
        *,
        generate: GenerateFn,
        environment: EnvironmentFactory,
        config: RolloutConfig,
        rubric: Rubric | None = None,
        active_time: ActiveTime | None = None,
    ) -> None:
        self._generate = generate
        self._active_time = active_time or ActiveTime()
        self._environment = environment
        self._config = config
        self._rubric = rubric
        self._running: dict[RolloutRun, None] = {}  # in the order of their start
        self._groups: dict[str, tuple[RolloutRun, ...]] = {}

    def activities(self) -> list[RolloutActivity]:
        """What each unfinished rollout waits for, for whoever reports a wait that is too long."""
        return [run.activity for run in self._running]

    def snapshot(
        self, group_id: str, partials: Mapping[str, Completion] | None = None
    ) -> tuple[RecordedRollout, ...]:
        """The siblings of a group that runs, as they are now; those that ended included.

        A group whose `run_group` raised stays as it was then, so that it can still be saved.

        ``partials`` are the tokens so far of running requests, by request id. The environments'
        states are there where the group was given an ``on_turn``.

        Raises:
            KeyError: no such group runs.
        """
        return tuple(run.snapshot(partials or {}) for run in self._groups[group_id])

    async def run_group(
        self,
        group_id: str,
        problem: Problem,
        *,
        size: int,
        seed: int,
        temperature: float | None = None,
        on_rollout: OnRollout | None = None,
        attempt: int = 0,
        min_version: int = 0,
        recorded: Mapping[str, RecordedRollout] | None = None,
        on_turn: OnTurn | None = None,
        on_discard: OnDiscard | None = None,
        generate: GenerateFn | None = None,
        active_time: ActiveTime | None = None,
    ) -> RolloutGroup:
        """Roll one problem out ``size`` times; siblings are ``{group_id}/r0``, ``/r1``, ...

        ``seed`` is the run's; each request's own follows from it, the rollout and the turn.
        ``temperature`` replaces the configured one (validation). ``on_rollout`` is called once for
        each sibling, with its final status and reward; with CANCELLED where this call is cancelled.

        ``attempt`` changes the seeds, and with them the requests' ids. No token is sampled under a
        policy before ``min_version``. ``recorded`` (by rollout id) holds siblings to be continued:
        finished turns are not sampled again; what another attempt recorded is passed over.
        ``on_turn`` is called once for each turn that the environment has answered, recorded ones
        excepted. ``on_discard`` is told of tokens that no rollout of the group holds: recorded ones
        that cannot be used (`ENV_NOT_RESUMABLE`, `ROLLED_BACK`), and those of a completion that was
        refused. ``generate`` replaces the usual one for this call, with its ``active_time``.

        Raises:
            asyncio.CancelledError: cancelled from outside; all environments are closed by then.
            ExceptionGroup: ``on_turn``, ``on_discard`` or ``on_rollout`` raised; siblings are
                cancelled.
        """
        runs = tuple(
            RolloutRun(
                rollout_id=f"{group_id}/r{i}",
                group_id=group_id,
                problem=problem,
                environment=self._environment,
                generate=generate or self._generate,
                config=self._config,
                seed=seed,
                temperature=self._config.sampling.temperature
                if temperature is None
                else temperature,
                active_time=active_time or self._active_time,
                attempt=attempt,
                min_version=min_version,
                recorded=(recorded or {}).get(f"{group_id}/r{i}"),
                on_turn=on_turn,
                on_discard=on_discard,
            )
            for i in range(size)
        )
        unreported = {run.rollout_id: run for run in runs}
        self._running |= dict.fromkeys(runs)
        self._groups[group_id] = runs

        def report(rollout: Rollout) -> None:
            self._running.pop(unreported.pop(rollout.rollout_id))
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
            self._forget(group_id, runs)
            raise
        finally:
            for run in unreported.values():
                self._running.pop(run)
        self._forget(group_id, runs)
        return RolloutGroup(group_id=group_id, problem=problem, rollouts=tuple(rollouts))

    def _forget(self, group_id: str, runs: tuple[RolloutRun, ...]) -> None:
        if self._groups.get(group_id) is runs:
            del self._groups[group_id]

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
        self, rubric: Rubric, rollouts: list[Rollout], runs: Sequence[RolloutRun], problem: Problem
    ) -> list[Rollout]:
        for run in runs:
            run.enter(Phase.REWARD, "score_group")
        return await score_whole_group(rubric, rollouts, problem)
