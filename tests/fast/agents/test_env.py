"""Agents through the real rollouter: turns, sampling, sessions, and the end of each request."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agent_rollouts import CLOSED, SlowGenerate, only, refusal, roll_out
from tests.support.agents import Hosted, asked, three_turns
from tests.support.resuming import SeededGenerate
from tests.support.rollouts import PROBLEM
from torchtitan_rl.agents.agent import AgentResult
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.episodes import outcome_rewards, rollout_to_episodes
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.types import UNKNOWN_EXPERT, RolloutGroup, RolloutStatus


def test_an_agents_requests_are_its_rollouts_turns_and_one_episode():
    rollout, hosted = only(three_turns)
    assert rollout.status is RolloutStatus.COMPLETED
    ids = [turn.completion.request_id for turn in rollout.turns]
    assert ids == ["g/r0/t0", "g/r0/t1", "g/r0/t2"]
    (episode,) = rollout_to_episodes(rollout, 1.0)
    assert episode.num_trained_tokens == rollout.num_sampled_tokens
    assert rollout.reward == sum(episode.token_ids)
    assert hosted.sessions.counts()["sessions_rewarded"] == 1
    (call,) = hosted.calls
    assert call.api_key == f"agent:{call.session_id}"
    assert call.problem is PROBLEM


def test_a_turns_request_leaves_out_the_experts_of_earlier_turns():
    generate = SeededGenerate()
    rollout, _ = only(three_turns, generate=generate)
    ends = [len(turn.token_ids) - 1 for turn in rollout.turns]
    assert [request.routed_from for request in generate.requests] == [0, *ends[:2]]
    (episode,) = rollout_to_episodes(rollout, 1.0)
    assert list(episode.routed_experts.data) == [*range(ends[2]), UNKNOWN_EXPERT]


def test_the_run_samples_at_its_own_temperature_and_seed_within_the_agents_limits():
    async def agent(ask, call):
        await ask((1, 2), max_tokens=2, temperature=0.0, seed=3, stop=("END",), num_logprobs=4)
        await ask((1, 2), max_tokens=99, stop_token_ids=(5,))
        return 1.0

    generate = SeededGenerate()
    rollout, _ = only(agent, generate=generate)
    first, second = (request.sampling for request in generate.requests)
    assert (first.temperature, second.temperature) == (0.7, 0.7)
    assert first.seed != second.seed != 3
    assert (first.max_tokens, first.stop, first.num_logprobs) == (2, ("END",), 4)
    assert (second.max_tokens, second.stop_token_ids) == (3, (5,))
    assert rollout.metrics["agent/ignored_options"] == 0
    again = SeededGenerate()
    only(agent, generate=again)
    assert again.requests == generate.requests  # seeds follow from the run, not from the session


def test_constraints_are_used_because_the_loss_knows_what_they_leave():
    constraints = {"structured_outputs": {"regex": "a"}, "bad_words": ["b"]}

    async def agent(ask, call):
        await ask((1,), engine_options=constraints | {"presence_penalty": 0.5})
        return 1.0

    generate = SeededGenerate()
    rollout, _ = only(agent, generate=generate)
    assert generate.requests[0].sampling.engine_options == constraints
    assert rollout.metrics["agent/ignored_options"] == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"engine_options": {"logit_bias": {"5": 1.0}}},
        {"min_tokens": 2},
        {"ignore_eos": True},
        {"prompt_logprobs": 2},
    ],
)
def test_sampling_that_an_agent_relies_on_is_refused_rather_than_changed(sampling):
    async def agent(ask, call):
        why = "would not know the sampling distribution|no scores of prompts"
        with pytest.raises(RefusedError, match=why) as caught:
            await ask((1,), **sampling)
        assert refusal(caught.value) == (400, "invalid_request")
        await ask((1,))
        return 1.0

    rollout, _ = only(agent)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.cause
    assert len(rollout.turns) == 1
    assert rollout.metrics["agent/refused_requests"] == 1


def test_a_turn_whose_client_is_gone_is_sampled_to_its_end_and_never_trained():
    async def agent(ask, call):
        task = asyncio.create_task(ask((1,)))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.sleep(0)
        await ask((3,))
        return 1.0

    rollout, _ = only(agent, generate=SlowGenerate())
    assert [turn.is_seen for turn in rollout.turns] == [False, True]
    assert [turn.prompt_token_ids for turn in rollout.turns] == [(1,), (3,)]
    (episode,) = rollout_to_episodes(rollout, 1.0)
    assert episode.num_trained_tokens == len(rollout.turns[1].completion.token_ids)
    assert rollout.metrics["agent/unseen_turns"] == 1


def test_a_reward_posted_from_outside_ends_the_rollout_of_a_hanging_agent():
    async def agent(ask, call):
        await ask((1,))
        loop = asyncio.get_running_loop()
        close = hosted.sessions.handlers()["session.close"]
        arguments = {"session_id": call.session_id, "reward": 0.5}
        loop.call_later(3, lambda: tasks.append(loop.create_task(close(arguments))))
        await asyncio.Event().wait()

    tasks, hosted = [], Hosted(agent)
    (rollout,) = roll_out(hosted)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 0.5)
    assert tasks[0].result()["turns"] == 1


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "extend", "spawn", "cancel", "sleep", "raise", "return", "post"]),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(scripts=st.lists(ACTIONS, min_size=1, max_size=3), max_turns=st.integers(1, 6))
def test_whatever_agents_do_every_sampled_token_is_accounted_for(scripts, max_turns):
    """Trap: conservation. What the generator sampled is the other side of the account."""

    async def agent(ask, call):
        prompt, spawned = (1, 2), []
        for action, number in scripts[len(hosted.calls) - 1]:
            if action == "ask":
                await ask((3, number))
            elif action == "extend":
                completion = await ask(prompt)
                prompt = (*prompt, *completion.token_ids, number)
            elif action == "spawn":
                spawned.append(asyncio.create_task(ask((4, number))))
                spawned[-1].add_done_callback(lambda task: task.cancelled() or task.exception())
            elif action == "cancel" and spawned:
                spawned[number % len(spawned)].cancel()
            elif action == "raise":
                raise ValueError(number)
            elif action == "post":
                await hosted.sessions.close(call.session_id, float(number))
            elif action == "return":
                return float(number)
            else:
                await asyncio.sleep(number / 2)
        return 1.0

    generate, hosted = SlowGenerate(), Hosted(agent)
    rollouts = roll_out(hosted, generate=generate, size=len(scripts), max_turns=max_turns)
    group = RolloutGroup(group_id="g", problem=PROBLEM, rollouts=rollouts)
    sampled = sum(len(turn.completion.token_ids) for r in rollouts for turn in r.turns)
    assert len(generate.requests) == sum(len(rollout.turns) for rollout in rollouts)
    batch = EpisodeBatcher(config=RolloutConfig(), row_len=512)
    counts = batch([group]).tokens
    assert counts.generated == sampled == counts.trained + sum(counts.discarded.values())
    unseen = sum(
        len(turn.completion.token_ids)
        for rollout in rollouts
        for turn in rollout.turns
        if not turn.is_seen and not rollout.status.is_failure
    )
    assert counts.discarded.get("unseen_turn", 0) == unseen
    assert hosted.sessions.counts()["sessions_open"] == 0


def test_after_a_limit_an_agent_is_refused_and_may_still_return_its_reward():
    async def agent(ask, call):
        for turn in range(3):
            await ask((1, 2, turn))
        with pytest.raises(RefusedError) as caught:
            await ask((1, 2, 3))
        assert refusal(caught.value) == CLOSED
        return 0.75

    rollout, hosted = only(agent, max_turns=3)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert (rollout.reward, len(rollout.turns)) == (0.75, 3)
    assert hosted.sessions.counts()["sessions_limit"] == 1


def test_an_agent_that_returns_nothing_after_a_limit_gets_the_tasks_reward():
    ended = []

    async def agent(ask, call):
        try:
            for turn in range(9):
                with contextlib.suppress(RefusedError):
                    await ask((1, 2, turn))
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    rollout, _ = only(agent, max_turns=2, reward_at_limit=-0.5)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert rollout.reward == -0.5
    assert ended == [True]
    rollout, _ = only(agent, max_turns=2, reward_at_limit=None)
    assert rollout.status is RolloutStatus.REWARD_ERROR


def test_an_agent_that_hangs_between_two_requests_is_cancelled_at_the_step_timeout():
    ended = []

    async def agent(ask, call):
        await ask((1,))
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    rollout, hosted = only(agent, step_timeout_s=30.0)
    assert rollout.status is RolloutStatus.STEP_TIMEOUT
    assert ended == [True]
    assert hosted.sessions.counts()["sessions_failed"] == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no tool"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError("by itself"),
    ],
)
def test_what_an_agent_raises_ends_its_rollout_with_the_cause(error):
    async def agent(ask, call):
        await ask((1,))
        raise error

    rollout, hosted = only(agent)
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert type(error).__name__ in rollout.cause
    assert len(rollout.turns) == 1
    assert hosted.sessions.counts()["sessions_failed"] == 1


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
    batch, *_ = EpisodeBatcher(config=RolloutConfig(advantage=kind), row_len=512)([group])
    return group, batch


def test_a_branch_with_a_reward_of_its_own_is_compared_with_the_rollouts_rewards():
    group, batch = rewarded()
    first, _ = group.rollouts
    assert sorted(turn.branch_reward or 0 for turn in first.turns) == [0, 0, 0.25]
    advantages = {value for value in batch.advantages.flatten().tolist() if value}
    assert advantages == {0.5, -0.5, -0.25}  # the baseline is the mean of 1 and 0


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
