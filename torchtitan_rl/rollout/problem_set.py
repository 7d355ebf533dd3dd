"""Fixed problems rolled out once each: evaluation, alongside training and by itself.

Invariant: ids and seeds follow from the problem, the number of the sample and the run's seed alone,
so the same policy gives the same rollouts wherever it is evaluated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.rollout.rollouter import OnRollout, Rollouter
from torchtitan_rl.rollout.task import Split
from torchtitan_rl.routing.clock import ActiveTime
from torchtitan_rl.types import GenerateFn, Problem, Rollout, RolloutGroup


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
    """Roll each problem out ``samples`` times; groups are ``{split}/{problem_id}``.

    Args:
        groups_at_once: how many problems run at a time; None is all of them.
        kept: finished rollouts of an interrupted evaluation, by id: they are returned as they are,
            and neither run nor reported again.
        on_rollout: called with each new rollout when it has its final status and reward.
        generate, active_time: replace the Rollouter's.
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
                recorded={name: _as_recorded(rollout) for name, rollout in own.items()},
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
    """The rollouts of a problem that are finished: ``samples`` of them if nothing is left to do."""
    group_id = f"{split}/{problem.problem_id}"
    names = (f"{group_id}/r{number}" for number in range(samples))
    rollouts = tuple(kept[name] for name in names if name in kept)
    return RolloutGroup(group_id=group_id, problem=problem, rollouts=rollouts)


def _as_recorded(rollout: Rollout) -> RecordedRollout:
    return RecordedRollout(rollout_id=rollout.rollout_id, turns=rollout.turns, ended=rollout)
