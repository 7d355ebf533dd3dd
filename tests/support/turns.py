"""Turns, rollouts and groups for tests, of which only what matters is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tests.support.rollouts import PROBLEM
from torchtitan_rl.token_sets import kept_runs
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    KeptTokens,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    RoutedExperts,
    Turn,
    VersionRun,
)


def turn(
    prompt: Iterable[int],
    sampled: Iterable[int],
    *,
    versions: Sequence[int] = (0,),
    logprobs: Iterable[float] | None = None,
    request_id: str = "g/r0/t0",
    **fields: Any,
) -> Turn:
    """``versions`` are those of the first tokens; later tokens have the last one."""
    token_ids = tuple(sampled)
    completion = Completion(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=tuple(-1 / (3 + i) for i in range(len(token_ids)))
        if logprobs is None
        else tuple(logprobs),
        version_runs=tuple(VersionRun(i, version) for i, version in enumerate(versions)),
        finish_reason=FinishReason.STOP,
    )
    return Turn(prompt_token_ids=tuple(prompt), completion=completion, **fields)


def with_kept(one: Turn, kept: tuple[KeptTokens, ...]) -> Turn:
    return replace(one, completion=replace(one.completion, kept_tokens=kept_runs(kept)))


def with_experts(one: Turn, *rows: int) -> Turn:
    """One layer, and one expert of each token."""
    routed = RoutedExperts(data=bytes(rows), num_layers=1, per_token=1)
    return replace(one, completion=replace(one.completion, routed_experts=routed))


def rollout(
    *turns: Turn,
    rollout_id: str = "g/r0",
    reward: float | None = 1.0,
    status: RolloutStatus = RolloutStatus.COMPLETED,
    **fields: Any,
) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        group_id=rollout_id.rpartition("/")[0],
        problem_id=PROBLEM.problem_id,
        turns=turns,
        status=status,
        reward=reward,
        **fields,
    )


def group(*rollouts: Rollout, group_id: str = "g", problem: Problem = PROBLEM) -> RolloutGroup:
    return RolloutGroup(group_id=group_id, problem=problem, rollouts=rollouts)
