"""Groups of rollouts: turns, requests, concurrency."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from tests.support.async_tests import cancel, ticks
from tests.support.rollouts import (
    PROBLEM,
    SCRIPT,
    BlockingEnv,
    CountingEnv,
    Factory,
    Hanging,
    ScriptedGenerate,
    config,
    make_rollouter,
    only,
    run_rollouts,
)
from torchtitan_rl.rollout.config import RolloutConfig, SamplingConfig
from torchtitan_rl.rollout.env import Observation, threaded
from torchtitan_rl.rollout.group_settings import siblings_together
from torchtitan_rl.rollout.rollout_run import Phase
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.types import RolloutStatus


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


def test_each_turn_is_a_request_of_its_own_in_the_rollouts_session():
    generate = ScriptedGenerate(SCRIPT)
    run_rollouts(Factory(CountingEnv), generate=generate, size=2)
    ids = sorted((request.request_id, request.session_id) for request in generate.requests)
    assert ids == [
        ("g/r0/t0", "g/r0"),
        ("g/r0/t1", "g/r0"),
        ("g/r1/t0", "g/r1"),
        ("g/r1/t1", "g/r1"),
    ]
    assert {request.sampling.temperature for request in generate.requests} == {0.7}
    assert len({request.sampling.seed for request in generate.requests}) == 4


@given(st.integers(1, 64), st.integers(2, 64), st.integers(1, 64))
def test_siblings_that_share_a_replica_leave_replicas_evenly_loaded(groups, size, replicas):
    config = RolloutConfig(groups_per_step=groups, group_size=size)
    together = siblings_together(config, replicas)
    assert size % together == 0
    if together > 1:
        parts = groups * size // together
        assert -(-parts // replicas) * replicas <= 1.125 * parts


def test_siblings_of_a_part_have_one_prompt_id_in_all_turns():
    generate = ScriptedGenerate(SCRIPT)
    run_rollouts(Factory(CountingEnv), generate=generate, size=2)
    assert len({request.prompt_id for request in generate.requests}) == 1


def test_two_runs_with_one_seed_ask_for_the_same():
    first, second = ScriptedGenerate(SCRIPT), ScriptedGenerate(SCRIPT)
    run_rollouts(Factory(CountingEnv), generate=first, size=3)
    run_rollouts(Factory(CountingEnv), generate=second, size=3)
    assert sorted(map(repr, first.requests)) == sorted(map(repr, second.requests))


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


def test_siblings_run_concurrently():
    """Each waits in its first turn until all have arrived there."""
    arrived = []
    everybody = asyncio.Event()

    async def wait_for_siblings():
        arrived.append(1)
        if len(arrived) == 5:
            everybody.set()
        await everybody.wait()
        return (11,)

    generate = ScriptedGenerate([lambda _: wait_for_siblings(), *SCRIPT[1:]])
    assert len(run_rollouts(Factory(CountingEnv), generate=generate, size=5)) == 5


def test_blocking_environments_block_only_their_own_rollout():
    """Plain methods meet at a barrier, which a single thread could never pass."""
    barrier = threading.Barrier(40)

    class Blocking(BlockingEnv):
        def reset(self):
            barrier.wait(timeout=60)
            return super().reset()

    envs = [Blocking() for _ in range(40)]
    rollouts = run_rollouts(Factory(*(partial(threaded, env) for env in envs)), size=40)
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.COMPLETED}
    assert [env.calls for env in envs] == [["reset", "step", "close"]] * 40


def test_a_prompt_may_be_given_as_a_list():
    class Lists(CountingEnv):
        async def reset(self):
            return Observation(prompt_token_ids=[1, 2])

    generate = ScriptedGenerate(SCRIPT)
    rollout = only(Factory(Lists), generate=generate)
    assert rollout.turns[0].prompt_token_ids == (1, 2)
    assert generate.requests[0].prompt_token_ids == (1, 2)


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
