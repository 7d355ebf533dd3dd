"""Limits of a rollout: turns, tokens, time."""

from __future__ import annotations

import asyncio

from tests.support.rollouts import (
    PROBLEM,
    SCRIPT,
    CountingEnv,
    Factory,
    ScriptedGenerate,
    complete,
    make_rollouter,
    only,
    run_rollouts,
)
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.rollout.env import Observation
from torchtitan_rl.routing.clock import ActiveTime
from torchtitan_rl.types import FinishReason, RolloutStatus


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


def test_a_first_prompt_at_the_limit_gives_a_rollout_without_turns():
    rollout = only(Factory(CountingEnv), max_total_tokens=2)
    assert (rollout.status, rollout.turns, rollout.reward) == (RolloutStatus.MAX_TOKENS, (), 0.125)


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


def test_a_completion_cut_at_its_budget_is_stepped_with_and_may_complete():
    factory = Factory(lambda: CountingEnv(turns=1))
    rollout = only(factory, max_tokens_per_turn=1)
    assert rollout.turns[0].completion.finish_reason is FinishReason.LENGTH
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)


def test_a_completion_cut_at_the_token_limit_ends_as_max_tokens_if_the_env_continues():
    factory = Factory(lambda: CountingEnv(turns=2))
    rollout = only(factory, max_total_tokens=3)
    assert rollout.status is RolloutStatus.MAX_TOKENS
    assert factory.made[0].calls == ["reset", "step", "finish max_tokens", "close"]


def test_an_empty_completion_is_stepped_with():
    rollout = only(Factory(CountingEnv), generate=ScriptedGenerate([(), (13,)]))
    assert rollout.status is RolloutStatus.COMPLETED
    assert [turn.completion.token_ids for turn in rollout.turns] == [(), (13,)]


def test_a_rollout_out_of_time_interrupts_generation_and_has_no_reward():
    generate = ScriptedGenerate([(11,), lambda _: asyncio.Event().wait()])
    factory = Factory(CountingEnv)
    rollout = only(factory, generate=generate, rollout_timeout_s=0.05)
    assert (rollout.status, rollout.reward) == (RolloutStatus.ROLLOUT_TIMEOUT, None)
    assert len(rollout.turns) == 1
    assert factory.made[0].calls[-2:] == ["finish rollout_timeout", "close"]


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
