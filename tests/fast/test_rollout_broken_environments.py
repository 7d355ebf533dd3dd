"""Environments that hang, raise, return garbage or are solved already: each ends by name."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.fast.rollouts import (
    CountingEnv,
    Factory,
    Hanging,
    closes,
    only,
    raising,
    run_rollouts,
)
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.types import RolloutStatus


def test_an_environment_that_hangs_ends_by_step_timeout_and_is_closed():
    factory = Factory(Hanging)
    rollout = only(factory, step_timeout_s=0.02)
    assert (rollout.status, rollout.reward) == (RolloutStatus.STEP_TIMEOUT, None)
    assert "step: no answer after 0.02 s" in rollout.cause
    assert factory.made[0].calls == ["reset", "step", "close"]
    assert len(rollout.turns) == 1  # what was sampled before is kept


def test_a_thread_that_hangs_does_not_keep_the_rollout():
    release = threading.Event()

    class Stuck(CountingEnv):
        def step(self, completion):
            release.wait()

    factory = Factory(Stuck)
    rollout = only(factory, step_timeout_s=0.02)
    release.set()
    assert rollout.status is RolloutStatus.STEP_TIMEOUT
    assert closes(factory) == [1]


def test_a_close_that_hangs_is_given_up_and_said():
    class NeverCloses(CountingEnv):
        async def close(self):
            await asyncio.Event().wait()

    rollout = only(Factory(NeverCloses), step_timeout_s=0.02)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert "close: no answer" in rollout.cause


def test_an_environments_own_time_error_is_not_taken_for_a_limit():
    class Raises(CountingEnv):
        async def step(self, completion):
            raise TimeoutError("the database")

    rollout = only(Factory(Raises))
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "step: TimeoutError: the database (test_rollout_broken_environments.py:" in rollout.cause


@pytest.mark.parametrize("method", ["reset", "step", "finish"])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), asyncio.CancelledError()])
def test_trap_18_an_environment_that_raises_ends_alone_with_a_cause(method, error):
    factory = Factory(raising(method, error), CountingEnv)
    broken, sound = run_rollouts(factory, size=2, max_turns=2)
    assert (broken.status, broken.reward) == (RolloutStatus.ENV_ERROR, None)
    assert method in broken.cause or "fail" in broken.cause
    assert type(error).__name__ in broken.cause
    assert (sound.status, sound.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert closes(factory) == [1, 1]


def test_an_environment_that_cannot_be_made_is_an_env_error():
    def explode():
        raise OSError("no disk")

    rollout = only(Factory(explode))
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "creation: OSError: no disk" in rollout.cause


@pytest.mark.parametrize("answer", [None, (1, 2), Observation(prompt_token_ids=())])
def test_an_answer_of_the_wrong_kind_is_an_env_error(answer):
    class Wrong(CountingEnv):
        async def step(self, completion):
            return answer

    factory = Factory(Wrong)
    assert only(factory).status is RolloutStatus.ENV_ERROR
    assert closes(factory) == [1]


def test_an_environment_may_end_its_rollout_with_a_failure_of_its_own():
    class GivesUp(CountingEnv):
        async def step(self, completion):
            return Terminal(reward=3.0, status=RolloutStatus.ENV_ERROR)

    rollout = only(Factory(GivesUp))
    assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_ERROR, None)
