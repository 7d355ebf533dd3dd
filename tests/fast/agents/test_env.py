"""Agents through the real rollouter: turns, sampling, sessions, and the end of each request."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agent_rollouts import CLOSED, SlowGenerate, only, refusal, roll_out
from tests.support.agents import Hosted, asked, three_turns
from tests.support.async_tests import cancel
from tests.support.resuming import SeededGenerate
from tests.support.rollouts import PROBLEM, make_rollouter
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.agents.agent import AgentResult
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric
from torchtitan_rl.serving.messages import RefusedError
from torchtitan_rl.types import RolloutGroup, RolloutStatus


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


def test_an_agent_gets_its_answer_under_its_own_requests_id():
    async def agent(ask, call):
        request = asked((1,), call.session_id, max_tokens=3)
        completion = await hosted.sessions.complete(request)
        assert completion.request_id == request.request_id
        return 1.0

    hosted = Hosted(agent)
    (rollout,) = roll_out(hosted)
    assert rollout.status is RolloutStatus.COMPLETED


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


def test_truncated_sampling_is_ignored_and_counted_so_that_the_loss_knows_the_distribution():
    async def agent(ask, call):
        penalties = {"presence_penalty": 0.5}
        await ask((1,), top_p=0.9, top_k=20, engine_options=penalties)
        return 1.0

    generate = SeededGenerate()
    rollout, _ = only(agent, generate=generate)
    assert not generate.requests[0].sampling.truncates
    assert rollout.metrics["agent/ignored_options"] == 3


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
    ],
)
def test_sampling_that_an_agent_relies_on_is_refused_rather_than_changed(sampling):
    async def agent(ask, call):
        with pytest.raises(RefusedError, match="training session") as caught:
            await ask((1,), **sampling)
        assert refusal(caught.value) == (400, "invalid_request")
        await ask((1,))
        return 1.0

    rollout, _ = only(agent)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.cause
    assert len(rollout.turns) == 1
    assert rollout.metrics["agent/refused_requests"] == 1


def test_a_result_brings_metrics_and_the_conversation_to_the_rubric():
    async def agent(ask, call):
        await ask((1,))
        return AgentResult(metrics={"tools": 2}, messages=({"role": "user", "content": "hi"},))

    rubric = Rubric([RewardFunction(name="n", function=lambda rollout, _: len(rollout.messages))])
    rollout, _ = only(agent, rubric=rubric)
    assert (rollout.reward, rollout.metrics["tools"]) == (1.0, 2.0)
    rollout, _ = only(agent)
    assert rollout.status is RolloutStatus.REWARD_ERROR  # without any reward


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


def test_an_agent_that_ends_with_requests_running_has_not_seen_their_answers():
    tasks = []

    async def agent(ask, call):
        tasks.extend(asyncio.create_task(ask((n,))) for n in range(3))
        await asyncio.sleep(0.5)
        return 1.0

    async def later(ask, call):
        result = await agent(ask, call)
        outcomes = asyncio.gather(*tasks, return_exceptions=True)
        tasks[:] = [outcomes]
        return result

    rollout, _ = only(later, generate=SlowGenerate())
    assert [turn.is_seen for turn in rollout.turns] == [False] * 3
    assert rollout.reward == 1.0
    assert [refusal(error) for error in tasks[0].result()] == [CLOSED] * 3


def test_a_reward_posted_to_the_session_ends_the_rollout():
    async def agent(ask, call):
        await ask((1,))
        await hosted.sessions.close(call.session_id, 0.5)
        with pytest.raises(RefusedError) as caught:
            await ask((1,))
        assert refusal(caught.value) == CLOSED
        return AgentResult(reward=9.0, metrics={"tools": 1})

    hosted = Hosted(agent)
    (rollout,) = roll_out(hosted)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 0.5)
    assert rollout.metrics["tools"] == 1
    assert hosted.sessions.read(hosted.calls[0].session_id).reward == 0.5


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


def test_a_session_closed_without_a_reward_leaves_it_to_the_agent():
    async def agent(ask, call):
        await ask((1,))
        await hosted.sessions.close(call.session_id)
        await asyncio.sleep(1)
        return 0.25

    hosted = Hosted(agent)
    (rollout,) = roll_out(hosted)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 0.25)


def test_cancelling_a_group_ends_its_agents():
    ended = []

    async def agent(ask, call):
        try:
            await ask((1,))
            await asyncio.Event().wait()
        finally:
            ended.append(call.session_id)

    async def scenario():
        rollouter = make_rollouter(hosted, generate=SeededGenerate())
        task = asyncio.create_task(rollouter.run_group("g", PROBLEM, size=3, seed=7))
        await asyncio.sleep(5)
        assert rollouter.activities()[0].detail == "waits for the agent's next request"
        await cancel(task)

    hosted = Hosted(agent)
    run_virtually(scenario())
    assert sorted(ended) == sorted(call.session_id for call in hosted.calls)
    assert hosted.sessions.counts()["sessions_open"] == 0


def test_a_failed_generation_reaches_the_agent_as_a_refusal_and_ends_the_rollout():
    async def broken(request):
        raise RuntimeError("no replica is left")

    async def agent(ask, call):
        with pytest.raises(RefusedError):
            await ask((1,))
        return 1.0

    rollout, _ = only(agent, generate=broken)
    assert rollout.status is RolloutStatus.GENERATION_ERROR
    assert rollout.reward is None


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
    _, counts, _ = batch([group])
    assert counts.generated == sampled == counts.trained + sum(counts.discarded.values())
    unseen = sum(
        len(turn.completion.token_ids)
        for rollout in rollouts
        for turn in rollout.turns
        if not turn.is_seen and not rollout.status.is_failure
    )
    assert counts.discarded.get("unseen_turn", 0) == unseen
    assert hosted.sessions.counts()["sessions_open"] == 0
