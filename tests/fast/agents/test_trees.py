"""Agents whose requests run at once: branches, seeds, streams, limits and rewards of branches."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agent_rollouts import CLOSED, SlowGenerate, only, refusal, roll_out
from tests.support.agents import Hosted, asked
from tests.support.resuming import SeededGenerate
from tests.support.rollouts import PROBLEM
from torchtitan_rl.agents.agent import AgentResult
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.episodes import outcome_rewards, rollout_to_episodes
from torchtitan_rl.serving.messages import RefusedError
from torchtitan_rl.types import Progress, RolloutGroup, RolloutStatus


class Meeting(SeededGenerate):
    """Answers no request until ``size`` of them run."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.barrier = asyncio.Barrier(size)

    async def __call__(self, request, /):
        await self.barrier.wait()
        return await super().__call__(request)


class Streaming(SlowGenerate):
    async def __call__(self, request, on_progress=None, /):
        completion = await super().__call__(request)
        for start, token in enumerate(completion.token_ids if on_progress else ()):
            await asyncio.sleep(1)
            on_progress(
                Progress(
                    request_id=request.request_id,
                    start=start,
                    token_ids=(token,),
                    logprobs=(completion.logprobs[start],),
                    version_runs=completion.version_runs,
                )
            )
        return completion


def test_requests_at_once_run_at_once_and_each_is_a_branch():
    async def agent(ask, call):
        answers = await asyncio.gather(*(ask((1, 2, n)) for n in range(3)))
        return float(len({answer.request_id for answer in answers}))

    rollout, _ = only(agent, generate=Meeting(3))
    assert rollout.reward == 3.0
    assert len(rollout_to_episodes(rollout, 1.0)) == 3


def test_a_sub_agent_and_a_compacted_history_are_branches_of_the_same_rollout():
    async def agent(ask, call):
        first = await ask((1, 2))
        grown = (1, 2, *first.token_ids, 0)
        await asyncio.gather(ask(grown), ask((8, 8)))  # the conversation, and a sub-agent
        await ask((1, 9))  # compacted
        return 1.0

    rollout, _ = only(agent, generate=SlowGenerate())
    lengths = [sum(episode.loss_mask) for episode in rollout_to_episodes(rollout, 1.0)]
    assert len(lengths) == 3
    assert sum(lengths) == rollout.num_sampled_tokens


@settings(max_examples=30, deadline=None)
@given(delays=st.permutations(range(4)))
def test_what_is_sampled_does_not_depend_on_the_order_in_which_requests_arrive(delays):
    async def agent(ask, call):
        async def branch(number):
            await asyncio.sleep(delays[number])
            completion = await ask((number,))
            await ask((number, *completion.token_ids, 0))

        await asyncio.gather(*map(branch, range(4)))
        return 1.0

    rollout, _ = only(agent, generate=SlowGenerate(), max_turns=8)
    sampled = {turn.prompt_token_ids: turn.completion.token_ids for turn in rollout.turns}
    assert sampled == in_order()


def in_order():
    async def agent(ask, call):
        for number in range(4):
            completion = await ask((number,))
            await ask((number, *completion.token_ids, 0))
        return 1.0

    rollout, _ = only(agent, max_turns=8)
    return {turn.prompt_token_ids: turn.completion.token_ids for turn in rollout.turns}


def test_equal_requests_are_sampled_with_different_seeds():
    async def agent(ask, call):
        await asyncio.gather(*(ask((1,)) for _ in range(3)))
        return 1.0

    generate = SeededGenerate()
    only(agent, generate=generate)
    assert len({request.sampling.seed for request in generate.requests}) == 3


def test_a_stream_gets_its_tokens_as_they_are_sampled():
    async def agent(ask, call):
        request = asked((1,), call.session_id, max_tokens=3)
        completion = await hosted.sessions.complete(request, streamed.append)
        pieces = [token for progress in streamed for token in progress.token_ids]
        assert tuple(pieces) == completion.token_ids
        gone = asyncio.create_task(
            hosted.sessions.complete(asked((2,), call.session_id), late.append)
        )
        await asyncio.sleep(1.5)
        gone.cancel()
        await asyncio.sleep(30)
        return 1.0

    streamed, late, hosted = [], [], Hosted(agent)
    (rollout,) = roll_out(hosted, generate=Streaming())
    assert rollout.status is RolloutStatus.COMPLETED, rollout.cause
    assert len(streamed) == len(rollout.turns[0].completion.token_ids)
    assert late == []  # nothing after its client had gone


def test_a_limit_lets_running_turns_end_and_refuses_the_rest():
    async def agent(ask, call):
        running = [asyncio.create_task(ask((n,))) for n in range(2)]
        await asyncio.sleep(0.5)
        with pytest.raises(RefusedError) as caught:
            await ask((5,))
        assert refusal(caught.value) == CLOSED
        return float(len(await asyncio.gather(*running)))

    rollout, _ = only(agent, generate=SlowGenerate(), max_turns=2)
    assert (rollout.status, rollout.reward) == (RolloutStatus.MAX_TURNS, 2.0)
    assert [turn.is_seen for turn in rollout.turns] == [True, True]


def test_a_failed_branch_ends_the_rollout_and_the_other_branches():
    async def generate(request):
        if request.prompt_token_ids == (1,):
            raise RuntimeError("no replica is left")
        await asyncio.Event().wait()

    async def agent(ask, call):
        outcomes = await asyncio.gather(*(ask((n,)) for n in range(3)), return_exceptions=True)
        assert [refusal(error) for error in outcomes] == [CLOSED] * 3
        return 1.0

    rollout, _ = only(agent, generate=generate)
    assert (rollout.status, rollout.turns) == (RolloutStatus.GENERATION_ERROR, ())


def rewarded(kind="mean"):
    """Siblings with rewards 1 and 0; the first has a second branch, with a reward of its own."""

    async def agent(ask, call):
        request = asked((1,), call.session_id)
        await hosted.sessions.complete(request)
        await ask((2,))
        await ask((3,))
        if call is hosted.calls[0]:
            hosted.sessions.reward_branch(call.session_id, 0.25, response_id=request.request_id)
            with pytest.raises(RefusedError) as caught:
                hosted.sessions.reward_branch(call.session_id, 0.25, response_id="other")
            assert refusal(caught.value) == (404, "response_not_found")
            with pytest.raises(RefusedError, match=r"has no choice 5 \(0\)"):
                hosted.sessions.reward_branch(
                    call.session_id, 0.25, response_id=request.request_id, choice=5
                )
            return 1.0
        return 0.0

    hosted = Hosted(agent)
    group = RolloutGroup(
        group_id="g", problem=PROBLEM, rollouts=roll_out(hosted, size=2, generate=SlowGenerate())
    )
    batch, _, _ = EpisodeBatcher(config=RolloutConfig(advantage=kind), row_len=512)([group])
    return group, batch


def test_a_branch_with_a_reward_of_its_own_is_compared_with_the_rollouts_rewards():
    group, batch = rewarded()
    first, _ = group.rollouts
    assert sorted(turn.branch_reward or 0 for turn in first.turns) == [0, 0, 0.25]
    advantages = {value for value in batch.advantages.flatten().tolist() if value}
    assert advantages == {0.5, -0.5, -0.25}  # the baseline is the mean of 1 and 0


def test_parts_of_a_session_have_rewards_of_their_own():
    async def duel(ask, call):
        for part, prompt in (("left", (1, 2)), ("right", (3, 4)), ("left", (5, 6))):
            request = asked(prompt, f"{call.session_id}.{part}", max_tokens=3)
            await hosted.sessions.complete(request)
        return AgentResult(reward=0.0, part_rewards={"left": 1.0, "right": -1.0})

    hosted = Hosted(duel)
    (rollout,) = roll_out(hosted)
    assert [turn.branch_reward for turn in rollout.turns] == [1.0, -1.0, 1.0]
    assert rollout.reward == 0.0


def test_the_reward_of_a_part_is_that_of_the_last_turns_of_its_branches():
    async def forks(ask, call):
        session = f"{call.session_id}.part"
        first = await hosted.sessions.complete(asked((1, 2), session, max_tokens=3))
        for number in (3, 4):
            grown = (1, 2, *first.token_ids, number)
            await hosted.sessions.complete(asked(grown, session, max_tokens=3))
        return AgentResult(reward=0.0, part_rewards={"part": 1.0, "no such part": 2.0})

    hosted = Hosted(forks)
    (rollout,) = roll_out(hosted)
    assert [turn.branch_reward for turn in rollout.turns] == [None, 1.0, 1.0]
    assert [
        one.advantages[-1] for one in rollout_to_episodes(rollout, outcome_rewards(rollout))
    ] == [
        1.0,
        1.0,
    ]
