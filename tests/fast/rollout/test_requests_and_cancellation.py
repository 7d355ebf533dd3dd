"""Requests that fail and groups that are cancelled: each rollout ends once and is closed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.async_tests import cancel, ticks
from tests.support.rollouts import (
    PROBLEM,
    SCRIPT,
    CountingEnv,
    Factory,
    ScriptedGenerate,
    closes,
    complete,
    make_rollouter,
    only,
    run_rollouts,
)
from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric
from torchtitan_rl.types import FinishReason, RolloutStatus


@pytest.mark.parametrize(
    "failure",
    [
        ReplicaError("replica 1 died"),
        RuntimeError("bug"),
        asyncio.CancelledError(),
        lambda request: complete(request, (1,), FinishReason.ABORT),
    ],
)
def test_a_request_that_fails_ends_its_rollout_only(failure):
    def second_fails(request):
        if not request.request_id.startswith("g/r1/"):
            return (13,)
        if isinstance(failure, BaseException):
            raise failure
        return failure(request)

    factory = Factory(CountingEnv)
    rollouts = run_rollouts(factory, generate=ScriptedGenerate([(11,), second_fails]), size=3)
    assert [rollout.status.value for rollout in rollouts] == [
        "completed",
        "generation_error",
        "completed",
    ]
    assert "g/r1/t1" in rollouts[1].cause
    assert rollouts[1].turns[0].completion.token_ids == (11,)
    assert closes(factory) == [1, 1, 1]


def test_misaligned_logprobs_never_reach_an_episode():
    def misaligned(request):
        return replace(complete(request, (1, 2)), logprobs=(-1.0,))

    rollout = only(Factory(CountingEnv), generate=ScriptedGenerate([misaligned]))
    assert rollout.status is RolloutStatus.GENERATION_ERROR
    assert "lengths (2, 1, 2)" in rollout.cause


def test_the_completion_of_another_request_is_refused():
    def others(request):
        return complete(replace(request, request_id="g/r7/t0"), (1,))

    rollout = only(Factory(CountingEnv), generate=ScriptedGenerate([others]))
    assert rollout.status is RolloutStatus.GENERATION_ERROR
    assert "g/r7/t0" in rollout.cause


def test_a_cancelled_group_closes_every_environment_and_reports_each_rollout_once():
    reported = []

    async def scenario(factory, turns_before):
        generate = ScriptedGenerate(
            [*SCRIPT[:turns_before], lambda _: asyncio.Event().wait(), *SCRIPT]
        )
        rubric = Rubric([RewardFunction(name="one", function=lambda r, p: 1.0)])
        rollouter = make_rollouter(factory, generate=generate, rubric=rubric)
        task = asyncio.create_task(
            rollouter.run_group("g", PROBLEM, size=3, seed=0, on_rollout=reported.append)
        )
        await ticks()
        await cancel(task)
        assert rollouter.activities() == []
        with pytest.raises(KeyError):
            rollouter.snapshot("g")

    for turns_before in (0, 1):
        factory = Factory(CountingEnv)
        reported.clear()
        asyncio.run(scenario(factory, turns_before))
        assert closes(factory) == [1, 1, 1]
        assert sorted(rollout.rollout_id for rollout in reported) == ["g/r0", "g/r1", "g/r2"]
        assert {rollout.status for rollout in reported} == {RolloutStatus.CANCELLED}
        assert {len(rollout.turns) for rollout in reported} == {turns_before}


def test_a_group_cancelled_before_it_began_still_reports_its_rollouts():
    reported = []

    async def scenario():
        rollouter = make_rollouter(Factory(CountingEnv))
        group = rollouter.run_group("g", PROBLEM, size=2, seed=0, on_rollout=reported.append)
        task = asyncio.create_task(group)
        await asyncio.sleep(0)
        await cancel(task)

    asyncio.run(scenario())
    assert [rollout.status for rollout in reported] == [RolloutStatus.CANCELLED] * 2


def test_close_runs_to_its_end_even_when_cancelled_twice():
    done = []

    class Slow(CountingEnv):
        async def close(self):
            await asyncio.sleep(0.02)
            done.append(1)

    async def scenario():
        rollouter = make_rollouter(Factory(Slow))
        task = asyncio.create_task(rollouter.run_group("g", PROBLEM, size=1, seed=0))
        while not rollouter.activities() or rollouter.activities()[0].detail != "close":
            await asyncio.sleep(0)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert done == [1]
