"""Groups of rollouts: turns, requests, concurrency."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.async_tests import cancel, ticks
from tests.support.resuming import SeededGenerate
from tests.support.rollouts import (
    PROBLEM,
    SCRIPT,
    CountingEnv,
    Factory,
    Hanging,
    ScriptedGenerate,
    closes,
    complete,
    config,
    make_rollouter,
    only,
    run_rollouts,
)
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.rollout.config import RolloutConfig, SamplingConfig
from torchtitan_rl.rollout.env import Observation
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.rollouter import Rollouter, siblings_together
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric, Score
from torchtitan_rl.rollout.run import Phase
from torchtitan_rl.routing.clock import ActiveTime
from torchtitan_rl.types import UNKNOWN_EXPERT, FinishReason, RolloutStatus


def test_a_rollout_alternates_prompts_and_completions_until_the_environment_ends_it():
    rollout = only(Factory(CountingEnv))
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.reward == 1.0
    assert [turn.prompt_token_ids for turn in rollout.turns] == [(1, 2), (1, 2, 11, 12, 0)]
    assert [turn.completion.token_ids for turn in rollout.turns] == [(11, 12), (13,)]
    assert [turn.reward for turn in rollout.turns] == [0.25, 0.5]
    assert rollout.turns[0].text == "turn"
    assert rollout.metrics == {"steps": 2}
    assert (rollout.rollout_id, rollout.group_id, rollout.problem_id) == ("g/r0", "g", "p")


def test_a_turns_request_leaves_out_the_experts_of_earlier_turns():
    generate = SeededGenerate()
    rollout = only(Factory(lambda: CountingEnv(turns=3)), generate=generate)
    ends = [len(turn.token_ids) - 1 for turn in rollout.turns]
    assert [request.routed_from for request in generate.requests] == [0, *ends[:2]]
    (episode,) = rollout_to_episodes(rollout, 1.0)
    assert list(episode.routed_experts.data) == [*range(ends[2]), UNKNOWN_EXPERT]


@given(st.integers(1, 64), st.integers(2, 64), st.integers(1, 64))
def test_siblings_that_share_a_replica_leave_replicas_evenly_loaded(groups, size, replicas):
    config = RolloutConfig(groups_per_step=groups, group_size=size)
    together = siblings_together(config, replicas)
    assert size % together == 0
    if together > 1:
        parts = groups * size // together
        assert -(-parts // replicas) * replicas <= 1.125 * parts


def test_validation_may_sample_at_another_temperature_and_cuts_nothing():
    def sampled(**validation) -> set[tuple[float, ...]]:
        generate = ScriptedGenerate(SCRIPT)
        sampling = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
        rollouter = Rollouter(
            generate=generate,
            environment=Factory(CountingEnv),
            config=replace(config(), sampling=sampling),
        )
        asyncio.run(rollouter.run_group("g", PROBLEM, size=1, seed=0, **validation))
        asked = [request.sampling for request in generate.requests]
        return {(one.temperature, one.top_p, one.top_k, one.min_p) for one in asked}

    assert sampled() == {(0.7, 0.9, 5, 0.1)}
    assert sampled(temperature=0.5) == {(0.5, 1.0, 0, 0.0)}


def test_activities_name_what_each_rollout_waits_for():
    async def scenario():
        generate = ScriptedGenerate([(11,), lambda _: asyncio.Event().wait()])
        rollouter = make_rollouter(Factory(CountingEnv, Hanging), generate=generate)
        task = asyncio.create_task(rollouter.run_group("g", PROBLEM, size=2, seed=0))
        await ticks()
        seen = [(a.rollout_id, a.turn, a.phase, a.detail) for a in rollouter.activities()]
        await cancel(task)
        return seen

    assert asyncio.run(scenario()) == [
        ("g/r0", 1, Phase.GENERATION, "g/r0/t1"),
        ("g/r1", 1, Phase.ENVIRONMENT, "step"),
    ]


def test_the_time_of_a_rollout_is_divided_into_its_phases():
    class Slow(CountingEnv):
        async def step(self, completion):
            await asyncio.sleep(3.0)
            return await super().step(completion)

    async def generate(request):
        await asyncio.sleep(5.0)
        return complete(request, (11,))

    async def score(rollout, problem):
        await asyncio.sleep(7.0)
        return 1.0

    class Together(Rubric):
        async def score_group(self, rollouts, problem):
            await asyncio.sleep(9.0)
            return [Score(reward=1.0) for _ in rollouts]

    async def times(rubric):
        factory = Factory(lambda: Slow(turns=2), lambda: Slow(turns=1))
        rollouter = make_rollouter(factory, generate=generate, rubric=rubric)
        group = await rollouter.run_group("g", PROBLEM, size=2, seed=0)
        return [dict(rollout.phase_s) for rollout in group.rollouts]

    alone = Rubric([RewardFunction(name="slow", function=score)])
    assert run_virtually(times(alone)) == [
        {"environment": 6.0, "generation": 10.0, "reward": 7.0},
        {"environment": 3.0, "generation": 5.0, "reward": 7.0},
    ]
    assert run_virtually(times(Together([]))) == [
        {"environment": 6.0, "generation": 10.0, "reward": 9.0},
        {
            "environment": 3.0,
            "generation": 5.0,
            "reward": 9.0,
        },  # waiting for the sibling does not count
    ]


def test_the_turn_limit_ends_a_rollout_with_the_reward_so_far():
    factory = Factory(lambda: CountingEnv(turns=9))
    rollout = only(factory, max_turns=3)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert len(rollout.turns) == 3
    assert rollout.reward == 0.125
    assert factory.made[0].calls == ["reset", *["step"] * 3, "finish max_turns", "close"]


def test_no_tokens_for_another_turn_end_a_rollout_as_max_tokens():
    rollout = only(Factory(lambda: CountingEnv(turns=9)), max_total_tokens=7, max_turns=9)
    assert rollout.status is RolloutStatus.MAX_TOKENS
    # prompts of 2, 5, 7 tokens: the third has no room left
    assert [len(turn.prompt_token_ids) for turn in rollout.turns] == [2, 5]


def test_the_budget_is_the_smallest_of_turn_rollout_and_observation():
    class Wish(CountingEnv):
        async def reset(self):
            return Observation(prompt_token_ids=(1, 2), max_tokens=self.wish)

    def budget(wish, **limits):
        generate = ScriptedGenerate(SCRIPT)
        Wish.wish = wish
        run_rollouts(Factory(lambda: Wish(turns=1)), generate=generate, **limits)
        return generate.requests[0].sampling.max_tokens

    assert budget(None, max_tokens_per_turn=6) == 6
    assert budget(None, max_tokens_per_turn=6, max_total_tokens=5) == 3
    assert budget(2, max_tokens_per_turn=6, max_total_tokens=5) == 2


def test_a_pause_does_not_count_against_the_rollouts_time():
    async def scenario():
        clock = ActiveTime()

        async def paused_generate(request):
            clock.pause()
            await asyncio.sleep(100.0)
            clock.resume()
            await asyncio.sleep(3.0)
            return complete(request, (11,))

        limits = {"rollout_timeout_s": 4.0, "step_timeout_s": 1.0}
        factory = Factory(CountingEnv)
        rollouter = make_rollouter(factory, generate=paused_generate, active_time=clock, **limits)
        return await rollouter.run_group("g", PROBLEM, size=1, seed=0)

    (rollout,) = run_virtually(scenario()).rollouts
    assert rollout.status is RolloutStatus.ROLLOUT_TIMEOUT
    assert len(rollout.turns) == 1


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
