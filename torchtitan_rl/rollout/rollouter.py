"""Groups of sibling rollouts: run at once, scored, and returned together.

Siblings are independent: one that fails has a status and a cause, and the others continue. Each is
scored and reported to ``on_rollout`` as soon as it ends; only a rubric that scores groups makes it
wait for the last sibling. Limits are enforced in `rollout_run.py`.

A running group can be saved (`snapshot`, ``on_turn``) and continued by another process
(``recorded``). A sibling that had ended keeps its status and is only scored again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.group_settings import (
    EnvironmentFactory,
    GroupSettings,
    OnDiscard,
    OnTurn,
    siblings_together,
)
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.rollout.rollout_run import Phase, RolloutActivity, RolloutRun
from torchtitan_rl.rollout.rubric import (
    Rubric,
    environment_score,
    score_whole_group,
    with_score,
)
from torchtitan_rl.routing.clock import ActiveTime
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

    ``environment`` is called on the event loop and must be quick; slow set-up belongs in the
    environment's ``reset``. Without a ``rubric`` the environment's reward is the rollout's.
    ``active_time`` (usually the router's) stands still while no rollout can generate.
    ``num_replicas`` share the rollouts of a step.
    """

    def __init__(
        self,
        *,
        generate: GenerateFn,
        environment: EnvironmentFactory,
        config: RolloutConfig,
        rubric: Rubric | None = None,
        active_time: ActiveTime | None = None,
        num_replicas: int = 1,
    ) -> None:
        self._generate = generate
        self._siblings_together = siblings_together(config, num_replicas)
        self._active_time = active_time or ActiveTime()
        self._environment = environment
        self._config = config
        self._rubric = rubric
        self._running: list[_Group] = []
        self._groups: dict[str, _Group] = {}  # by id: the newest, for `snapshot`

    def activities(self) -> list[RolloutActivity]:
        """What each unfinished rollout waits for."""
        return [run.activity for group in self._running for run in group.unreported.values()]

    def snapshot(
        self, group_id: str, partials: Mapping[str, Completion] | None = None
    ) -> tuple[RecordedRollout, ...]:
        """The siblings of a running group as they are now, including those that have ended.

        A group whose `run_group` raised an error stays as it was then, and can still be saved.

        ``partials`` are the tokens sampled so far for running requests, by request id. The
        environments' states are included if the group has an ``on_turn``.

        Raises:
            KeyError: no such group runs.
        """
        return tuple(run.snapshot(partials or {}) for run in self._groups[group_id].runs)

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

        Args:
            seed: the run's; the seed of each request is derived from it.
            temperature: replaces the configured sampling (validation), and cuts no tokens.
            on_rollout: called once for each sibling, with its final status and reward; with
                CANCELLED if this call is cancelled.
            attempt: changes the ids and seeds of the requests.
            min_version: no token is sampled under an older policy.
            recorded: siblings to be continued, by rollout id: finished turns are not sampled
                again. Those of another attempt are discarded.
            on_turn: called with the rollout so far, once for each turn that the environment has
                answered, except recorded ones.
            on_discard: called with tokens that are in no rollout of the group: recorded ones that
                cannot be used (`ENV_NOT_RESUMABLE`, `ROLLED_BACK`), and those of a completion that
                was refused.
            generate, active_time: replace the Rollouter's for this call.

        Raises:
            asyncio.CancelledError: cancelled from outside; all environments are closed.
            ExceptionGroup: ``on_turn``, ``on_discard`` or ``on_rollout`` raised, or too many
                abandoned calls hang (`HangingCallsError`); siblings are cancelled.
        """
        sampling = self._config.sampling
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
        settings = GroupSettings(
            group_id=group_id,
            problem=problem,
            environment=self._environment,
            generate=generate or self._generate,
            config=self._config,
            seed=seed,
            sampling=sampling,
            active_time=active_time or self._active_time,
            attempt=attempt,
            min_version=min_version,
            siblings_together=self._siblings_together,
            on_turn=on_turn,
            on_discard=on_discard,
        )
        group = _Group(settings, size, recorded or {}, self._rubric, on_rollout)
        self._running.append(group)
        self._groups[group_id] = group
        try:
            result = await group.run()
        except asyncio.CancelledError:
            self._forget(group_id, group)
            raise
        finally:
            self._running.remove(group)
        self._forget(group_id, group)
        return result

    def _forget(self, group_id: str, group: _Group) -> None:
        if self._groups.get(group_id) is group:  # not of a later call with the same id
            del self._groups[group_id]


class _Group:
    """One call of `run_group`; ``unreported`` are the siblings that have no final status yet."""

    def __init__(
        self,
        settings: GroupSettings,
        size: int,
        recorded: Mapping[str, RecordedRollout],
        rubric: Rubric | None,
        on_rollout: OnRollout | None,
    ) -> None:
        ids = [f"{settings.group_id}/r{i}" for i in range(size)]
        self.runs = tuple(RolloutRun(name, settings, recorded.get(name)) for name in ids)
        self.unreported = dict(zip(ids, self.runs, strict=True))
        self._settings = settings
        self._rubric = rubric
        self._on_rollout = on_rollout

    async def run(self) -> RolloutGroup:
        """See `Rollouter.run_group`."""
        group_id, problem, rubric = self._settings.group_id, self._settings.problem, self._rubric
        try:
            if rubric is not None and rubric.scores_groups:
                rollouts = await self._run_then_score(rubric, problem)
            else:
                async with asyncio.TaskGroup() as siblings:
                    tasks = [siblings.create_task(self._run_and_score(run)) for run in self.runs]
                rollouts = [task.result() for task in tasks]
        except asyncio.CancelledError:
            for run in list(self.unreported.values()):
                self._report(run.so_far(RolloutStatus.CANCELLED))
            raise
        return RolloutGroup(group_id=group_id, problem=problem, rollouts=tuple(rollouts))

    async def _run_then_score(self, rubric: Rubric, problem: Problem) -> list[Rollout]:
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(run.run()) for run in self.runs]
        for run in self.runs:
            run.enter(Phase.REWARD, "score_group")
        rollouts = await score_whole_group(rubric, [task.result() for task in tasks], problem)
        for rollout in rollouts:
            self._report(rollout)
        return rollouts

    async def _run_and_score(self, run: RolloutRun) -> Rollout:
        rollout = await run.run()
        if not rollout.status.is_failure:
            if self._rubric is None:
                score = environment_score(rollout)
            else:
                run.enter(Phase.REWARD, "rubric")
                score = await self._rubric.score(rollout, self._settings.problem)
            rollout = with_score(rollout, score)
        self._report(rollout)
        return rollout

    def _report(self, rollout: Rollout) -> None:
        del self.unreported[rollout.rollout_id]
        if self._on_rollout is not None:
            self._on_rollout(rollout)
