"""Runs groups of sibling rollouts, the rollouts of one problem. Siblings run at the same time, are
scored, and are returned together.

Siblings are independent: if one fails, it gets a status and a cause, and the others continue. Each
is scored and reported to ``on_rollout`` as soon as it ends, unless the rubric scores whole groups.
A running group can be saved (`snapshot`, ``on_turn``) and continued by another process
(``recorded``); a sibling that has ended is only scored again.

Invariant: ids and seeds depend only on the group's id, the sibling's number, the attempt and the
run's seed, so that the same policy gives the same rollouts in every process.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.places import Places
from torchtitan_rl.rollout.records import RecordedRollout
from torchtitan_rl.rollout.rubric import (
    Rubric,
    environment_score,
    score_whole_group,
    with_score,
)
from torchtitan_rl.rollout.run import (
    EnvironmentFactory,
    GroupSettings,
    OnDiscard,
    OnTurn,
    Phase,
    RolloutActivity,
    RolloutRun,
)
from torchtitan_rl.rollout.task import Split
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
ScoreTokens = Callable[[Rollout, Problem], Awaitable[Rollout]]
"""Adds a teacher's scores to a finished rollout (`distillation/scoring.py`)."""


@dataclass(kw_only=True, eq=False)
class Rollouter:
    """Runs groups, any number of them concurrently, on one event loop.

    ``environment`` is called on the event loop and must be quick. Without a ``rubric``, rollouts
    get the reward of their environment. ``active_time`` (usually the router's clock) is stopped
    while no rollout can generate. ``num_replicas`` returns the number of replicas that share a
    step's rollouts now. A rollout takes one of the ``places``, except with another ``generate``.
    """

    generate: GenerateFn
    environment: EnvironmentFactory
    config: RolloutConfig
    rubric: Rubric | None = None
    active_time: ActiveTime | None = None
    num_replicas: Callable[[], int] = lambda: 1
    places: Places | None = None
    _running: dict[_Group, None] = field(default_factory=dict)  # oldest first
    _groups: dict[str, _Group] = field(default_factory=dict)  # the newest by id, for `snapshot`

    def activities(self) -> list[RolloutActivity]:
        """Return what each unfinished rollout waits for."""
        return [run.activity for group in self._running for run in group.unreported.values()]

    def snapshot(
        self, group_id: str, partials: Mapping[str, Completion] | None = None
    ) -> tuple[RecordedRollout, ...]:
        """Record the siblings of a running group as they are now, including those that have ended,
        and the environments' states if the group has an ``on_turn``. A group whose `run_group`
        raised an error keeps its last state.

        ``partials`` are the tokens sampled so far for running requests, by request id. Raises
        KeyError: no group with this id runs.
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
        score_tokens: ScoreTokens | None = None,
    ) -> RolloutGroup:
        """Roll one problem out ``size`` times; siblings are ``{group_id}/r0``, ``/r1``, ...

        Args:
            seed: the run's seed, from which the seed of each request is derived.
            temperature: for validation: completions are then sampled from all tokens.
            on_rollout: called once for each sibling, with its final status and reward; with
                CANCELLED if this call is cancelled.
            attempt: changes the ids and seeds of the requests.
            min_version: no token is sampled under an older policy.
            recorded: siblings of this attempt to continue, by rollout id: finished turns are not
                sampled again.
            on_turn: called with the rollout so far, once for each turn that the environment has
                answered, except recorded ones.
            on_discard: called with the number of tokens that are in no rollout of the group:
                recorded ones that cannot be used (`ENV_NOT_RESUMABLE`, `ROLLED_BACK`), and those of
                a refused completion.
            generate, active_time: replace those of the `Rollouter` for this call.
            score_tokens: called with each rollout that has a reward.

        Raises:
            asyncio.CancelledError: the call was cancelled; all environments are closed.
            ExceptionGroup: a callback raised, or too many abandoned calls hang
                (`HangingCallsError`). The siblings are cancelled.
        """
        config = self.config
        if temperature is not None:
            every = replace(config.sampling, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
            config = replace(config, sampling=every)
        settings = GroupSettings(
            group_id=group_id,
            problem=problem,
            environment=self.environment,
            generate=generate or self.generate,
            config=config,
            seed=seed,
            active_time=active_time or self.active_time or ActiveTime(),
            attempt=attempt,
            min_version=min_version,
            siblings_together=siblings_together(self.config, max(1, self.num_replicas())),
            places=self.places if generate is None else None,
            on_turn=on_turn,
            on_discard=on_discard,
        )
        runs = tuple(
            RolloutRun(name, settings, (recorded or {}).get(name))
            for name in (f"{group_id}/r{number}" for number in range(size))
        )
        group = _Group(settings, runs, self.rubric, on_rollout, score_tokens)
        self._running[group] = None
        self._groups[group_id] = group
        try:
            result = await group.run()
        except asyncio.CancelledError:
            self._forget(group_id, group)
            raise
        finally:
            del self._running[group]
        self._forget(group_id, group)
        return result

    def _forget(self, group_id: str, group: _Group) -> None:
        if self._groups.get(group_id) is group:  # unless a later call uses the same id
            del self._groups[group_id]


@dataclass(eq=False)
class _Group:
    """One call of `run_group`. ``unreported`` are the siblings without a final status."""

    settings: GroupSettings
    runs: tuple[RolloutRun, ...]
    rubric: Rubric | None
    on_rollout: OnRollout | None
    score_tokens: ScoreTokens | None

    def __post_init__(self) -> None:
        self.unreported = {run.rollout_id: run for run in self.runs}

    async def run(self) -> RolloutGroup:
        """See `Rollouter.run_group`."""
        group_id, problem, rubric = self.settings.group_id, self.settings.problem, self.rubric
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
        scored = await score_whole_group(rubric, [task.result() for task in tasks], problem)
        async with asyncio.TaskGroup() as siblings:
            pairs = zip(self.runs, scored, strict=True)
            ending = [siblings.create_task(self._end(run, one)) for run, one in pairs]
        return [task.result() for task in ending]

    async def _run_and_score(self, run: RolloutRun) -> Rollout:
        rollout = await run.run()
        if not rollout.status.is_failure:
            if self.rubric is None:
                score = environment_score(rollout)
            else:
                run.enter(Phase.REWARD, "rubric")
                score = await self.rubric.score(rollout, self.settings.problem)
            rollout = with_score(rollout, score)
        return await self._end(run, rollout)

    async def _end(self, run: RolloutRun, rollout: Rollout) -> Rollout:
        """Let the teacher score the rollout's tokens, and report the rollout."""
        if self.score_tokens is not None and rollout.reward is not None:
            run.enter(Phase.TEACHER, "scores")
            rollout = await self.score_tokens(rollout, self.settings.problem)
        rollout = run.timed(rollout)
        self._report(rollout)
        return rollout

    def _report(self, rollout: Rollout) -> None:
        del self.unreported[rollout.rollout_id]
        if self.on_rollout is not None:
            self.on_rollout(rollout)


_MOST_UNEVEN = 1.125  # limit of the busiest replica's rollouts, relative to the mean


def siblings_together(config: RolloutConfig, num_replicas: int) -> int:
    """Return how many siblings share a replica, which computes their prompt once: the largest
    number for which the busiest replica gets at most an eighth more rollouts of a step than the
    mean.

    >>> [siblings_together(RolloutConfig(groups_per_step=8, group_size=8), n) for n in (2, 5, 16)]
    [8, 2, 4]
    """
    size = config.group_size
    for together in range(size, 1, -1):
        parts = config.groups_per_step * (size // together)
        busiest = -(-parts // num_replicas)
        if size % together == 0 and busiest * num_replicas <= _MOST_UNEVEN * parts:
            return together
    return 1


async def roll_out_problems(
    rollouter: Rollouter,
    problems: Sequence[Problem],
    *,
    split: Split = "validation",
    samples: int,
    seed: int,
    temperature: float,
    groups_at_once: int | None = None,
    kept: Mapping[str, Rollout] | None = None,
    on_rollout: OnRollout | None = None,
    generate: GenerateFn | None = None,
    active_time: ActiveTime | None = None,
) -> tuple[RolloutGroup, ...]:
    """Roll fixed problems out ``samples`` times each; groups are ``{split}/{problem_id}``.

    Args:
        groups_at_once: how many problems run at a time; None: all of them.
        kept: finished rollouts of an interrupted evaluation, by id, which are returned unchanged.
        on_rollout: called with each new rollout when it has its final status and reward.
        generate, active_time: replace those of the `Rollouter` for this call.
    """
    kept = kept or {}
    room = asyncio.Semaphore(groups_at_once or max(1, len(problems)))

    def report(rollout: Rollout) -> None:
        if on_rollout is not None and rollout.rollout_id not in kept:
            on_rollout(rollout)

    async def group_of(problem: Problem) -> RolloutGroup:
        before = finished_group(problem, kept, split=split, samples=samples)
        if len(before.rollouts) == samples:
            return before
        own = {rollout.rollout_id: rollout for rollout in before.rollouts}
        async with room:
            group = await rollouter.run_group(
                before.group_id,
                problem,
                size=samples,
                seed=seed,
                temperature=temperature,
                on_rollout=report,
                recorded={
                    name: RecordedRollout(rollout_id=name, turns=rollout.turns, ended=rollout)
                    for name, rollout in own.items()
                },
                generate=generate,
                active_time=active_time,
            )
        rollouts = (own.get(rollout.rollout_id, rollout) for rollout in group.rollouts)
        return replace(group, rollouts=tuple(rollouts))

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(group_of(problem)) for problem in problems]
    return tuple(task.result() for task in running)


def finished_group(
    problem: Problem, kept: Mapping[str, Rollout], *, split: Split, samples: int
) -> RolloutGroup:
    """Return the group of a problem with its finished rollouts in ``kept``; it is complete with
    ``samples`` of them."""
    group_id = f"{split}/{problem.problem_id}"
    names = (f"{group_id}/r{number}" for number in range(samples))
    rollouts = tuple(kept[name] for name in names if name in kept)
    return RolloutGroup(group_id=group_id, problem=problem, rollouts=rollouts)


_CAUSE_CHARS = 300
_PARTICULARS = re.compile(r"\S*\d\S*")  # ids, addresses and numbers


def num_failed(groups: Sequence[RolloutGroup]) -> int:
    return sum(rollout.status.is_failure for group in groups for rollout in group.rollouts)


def describe_failures(groups: Sequence[RolloutGroup]) -> str:
    """Describe failed rollouts with their most frequent cause, such as ``2 of 16 rollouts failed:
    env_error: no disk (2x)``; empty without any."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if rollout.status.is_failure]
    if not failed:
        return ""
    causes = Counter(map(_kind, failed))
    ((kind, number),) = causes.most_common(1)
    cause = " ".join(_cause(next(one for one in failed if _kind(one) == kind)).split())
    if len(cause) > _CAUSE_CHARS:
        cause = f"{cause[:_CAUSE_CHARS]}..."
    others = len(causes) - 1
    more = f", and {others} other cause{'s' if others > 1 else ''}" if others else ""
    return f"{len(failed)} of {len(rollouts)} rollouts failed: {cause} ({number}x){more}"


def all_failed_alike(groups: Sequence[RolloutGroup]) -> bool:
    """Whether all rollouts failed for the same cause."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return all(one.status.is_failure for one in rollouts) and len(set(map(_kind, rollouts))) == 1


def _cause(rollout: Rollout) -> str:
    status = rollout.status.value
    return f"{status}: {rollout.cause}" if rollout.cause else status


def _kind(rollout: Rollout) -> str:
    """Return the cause without ids and numbers, so that equal failures compare equal."""
    return _PARTICULARS.sub("#", _cause(rollout).replace(rollout.rollout_id, "#0"))
