"""How the rollout of an agent ends: limits, timeouts, and what the agent raises or returns."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.agent_rollouts import CLOSED, SlowGenerate, only, refusal, roll_out
from tests.support.agents import Hosted, three_turns
from torchtitan_rl.serving.messages import RefusedError
from torchtitan_rl.types import RolloutStatus


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


@pytest.mark.parametrize("behaviour", ["hang", "escape", "swallow"])
def test_an_agent_that_returns_nothing_after_a_limit_gets_the_tasks_reward(behaviour):
    ended = []

    async def agent(ask, call):
        try:
            for turn in range(9):
                try:
                    await ask((1, 2, turn))
                except RefusedError:
                    if behaviour == "escape":
                        raise
                    if behaviour == "hang":
                        await asyncio.Event().wait()
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    rollout, _ = only(agent, max_turns=2, reward_at_limit=-0.5)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert rollout.reward == -0.5
    assert ended == [True]
    rollout, _ = only(agent, max_turns=2, reward_at_limit=None)
    assert rollout.status is RolloutStatus.REWARD_ERROR


def test_a_prompt_that_leaves_no_room_ends_the_rollout_and_is_refused():
    async def agent(ask, call):
        await ask((1,))
        with pytest.raises(RefusedError):
            await ask(range(1, 50))
        return 0.25

    rollout, _ = only(agent, max_total_tokens=40)
    assert (rollout.status, rollout.reward) == (RolloutStatus.MAX_TOKENS, 0.25)
    assert len(rollout.turns) == 1


def test_a_rollout_out_of_time_refuses_the_request_that_runs():
    async def agent(ask, call):
        for _ in range(4):
            await ask((1,))
        with pytest.raises(RefusedError):
            await ask((1,))
        return 0.75

    rollout, _ = only(agent, generate=SlowGenerate(), max_turns=99, rollout_timeout_s=4.5)
    assert (rollout.status, rollout.reward) == (RolloutStatus.ROLLOUT_TIMEOUT, None)
    assert len(rollout.turns) == 4


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


def test_an_agent_that_ignores_its_cancellation_is_named_in_the_cause():
    async def agent(ask, call):
        await ask((1,))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    rollout, _ = only(agent, step_timeout_s=30.0)
    assert rollout.status is RolloutStatus.STEP_TIMEOUT
    assert "did not end within 5.0 s of its cancellation" in rollout.cause


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no tool"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError("by itself"),
    ],
)
@pytest.mark.parametrize("turns", [0, 1])
def test_what_an_agent_raises_ends_its_rollout_with_the_cause(error, turns):
    async def agent(ask, call):
        for _ in range(turns):
            await ask((1,))
        raise error

    rollout, hosted = only(agent)
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert type(error).__name__ in rollout.cause
    assert len(rollout.turns) == turns
    assert hosted.sessions.counts()["sessions_failed"] == 1


def test_an_agent_that_asks_for_nothing_fails():
    async def agent(ask, call):
        return 1.0

    rollout, _ = only(agent)
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "without asking for a single completion" in rollout.cause


@pytest.mark.parametrize("answer", ["1.0", {"reward": 1.0}, [1.0]])
def test_an_agent_that_returns_something_else_than_a_reward_fails(answer):
    async def agent(ask, call):
        await ask((1,))
        return answer

    rollout, _ = only(agent)
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "expected a number as reward" in rollout.cause


def test_what_an_agent_needs_may_take_longer_to_start_than_a_step():
    async def start() -> None:
        await asyncio.sleep(100)

    hosted = Hosted(three_turns, prepare=start)
    (rollout,) = roll_out(hosted, step_timeout_s=60.0)
    assert rollout.status is RolloutStatus.COMPLETED


def test_an_agent_whose_preparation_fails_fails_alone():
    async def start() -> None:
        raise OSError("no such server")

    (rollout,) = roll_out(Hosted(three_turns, prepare=start))
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "no such server" in rollout.cause
