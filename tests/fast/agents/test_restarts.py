"""Agents that are started again: after a failure of their own, and after the run was killed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agent_rollouts import SlowGenerate, only, roll_out
from tests.support.agents import Hosted, three_turns
from tests.support.resuming import Run, SeededGenerate, contents, stops
from torchtitan_rl.rollout.episodes import num_unseen_tokens
from torchtitan_rl.types import RolloutStatus


def crashing(*, after: int, times: int, agent=three_turns):
    """An agent whose first ``times`` lives end after so many answers."""
    lives = []

    async def run(ask, call):
        lives.append(0)

        async def counted(*args, **sampling):
            if lives[-1] == after and len(lives) <= times:
                raise OSError("crash")
            lives[-1] += 1
            return await ask(*args, **sampling)

        return await agent(counted, call)

    return run


@pytest.mark.parametrize("after", [0, 2, 3])
def test_a_replayable_agent_that_fails_goes_on_where_it_was(after):
    whole, _ = only(three_turns)
    generate = SeededGenerate()
    rollout, hosted = only(crashing(after=after, times=2), replays=True, generate=generate)
    assert (rollout.turns, rollout.reward) == (whole.turns, whole.reward)
    assert len(generate.requests) == 3  # each turn was sampled once
    is_early = after < 3
    assert rollout.metrics["agent/restarts"] == 2 * is_early
    assert rollout.metrics["agent/replayed_turns"] == after * is_early
    assert hosted.sessions.counts()["sessions_restarted"] == 2 * is_early


def test_an_agent_is_restarted_only_if_it_replays_and_only_so_often():
    rollout, _ = only(crashing(after=1, times=1))
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.ENV_ERROR, 1)
    rollout, hosted = only(crashing(after=1, times=9), replays=True, max_restarts=2)
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "OSError: crash" in rollout.cause
    assert len(hosted.calls) == 3
    assert len({call.session_id for call in hosted.calls}) == 3


def test_what_a_restarted_agent_does_not_ask_again_is_a_branch_without_loss():
    async def agent(ask, call):
        life = len(hosted.calls)
        await ask((1,))
        await ask((2, life))
        if life == 1:
            raise OSError("crash")
        return 1.0

    hosted = Hosted(agent, replays=True)
    (rollout,) = roll_out(hosted, generate=SlowGenerate())
    assert [turn.prompt_token_ids for turn in rollout.turns] == [(1,), (2, 1), (2, 2)]
    assert [turn.is_seen for turn in rollout.turns] == [True, False, True]
    assert num_unseen_tokens(rollout) == len(rollout.turns[1].completion.token_ids)
    assert rollout.metrics["agent/unreplayed_turns"] == 1


async def branching(ask, call) -> float:
    """A conversation, and sub-agents that run alongside."""

    async def branch(number: int) -> int:
        first = await ask((number,), max_tokens=3)
        second = await ask((number, *first.token_ids, 0), max_tokens=3)
        return sum(second.token_ids)

    return float(sum(await asyncio.gather(*map(branch, range(2)))))


@pytest.mark.parametrize("agent", [three_turns, branching])
def test_a_resumed_run_answers_replayable_agents_from_its_record(agent):
    def bound():
        return Hosted(agent, replays=True).bound

    whole = Run(bound(), rubric=None).whole()
    for _, recorded in stops(bound(), rubric=None):
        run = Run(bound(), rubric=None)
        group = run.whole(recorded)
        kept = {turn.completion.request_id for entry in recorded for turn in entry.turns}
        assert run.discarded == []
        assert not kept & {request.request_id for request in run.generate.requests}
        if agent is three_turns:
            assert [c[:3] for c in contents(group)] == [c[:3] for c in contents(whole)]
        assert sampled(group) == sampled(whole)


def sampled(group):
    """What is trained on, whatever the order of the turns."""
    return [
        (
            rollout.status,
            rollout.reward,
            {turn.prompt_token_ids: turn.completion.token_ids for turn in rollout.turns},
            num_unseen_tokens(rollout),
        )
        for rollout in group.rollouts
    ]


@settings(max_examples=40, deadline=None)
@given(
    crashes=st.lists(st.integers(0, 5), max_size=3),
    replays=st.booleans(),
    size=st.integers(1, 3),
)
def test_however_often_agents_crash_every_sampled_token_is_in_one_turn(crashes, replays, size):
    lives = {}

    async def agent(ask, call):
        life = lives[call.session_id] = len(lives)

        async def counted(*args, **sampling):
            completion = await ask(*args, **sampling)
            if life < len(crashes) and len(completion.token_ids) > crashes[life] // 2:
                raise OSError("crash")
            return completion

        return await branching(counted, call)

    generate, hosted = SlowGenerate(), Hosted(agent, replays=replays, max_restarts=3)
    rollouts = roll_out(hosted, generate=generate, size=size)
    ids = [turn.completion.request_id for rollout in rollouts for turn in rollout.turns]
    assert sorted(ids) == sorted(request.request_id for request in generate.requests)
    assert hosted.sessions.counts()["sessions_open"] == 0
