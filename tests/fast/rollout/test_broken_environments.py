"""Environments that hang, raise, return garbage or are already solved: each ends with a status."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from tests.support.rollouts import (
    PROBLEM,
    BlockingEnv,
    CountingEnv,
    Factory,
    Hanging,
    closes,
    make_rollouter,
    only,
    raising,
    run_rollouts,
)
from torchtitan_rl.rollout.env import Observation, Terminal, threaded
from torchtitan_rl.rollout.message_env import MessageObservation
from torchtitan_rl.types import RolloutStatus


def answering(method: str, answer):
    class Wrong(CountingEnv):
        pass

    async def give(self, *args):
        return answer() if callable(answer) else answer

    setattr(Wrong, method, give)
    return lambda: Wrong(turns=9)


def observation(**fields) -> Observation:
    return Observation(**{"prompt_token_ids": (1, 2), **fields})


def test_an_environment_that_hangs_ends_by_step_timeout_and_is_closed():
    factory = Factory(Hanging)
    rollout = only(factory, step_timeout_s=0.02)
    assert (rollout.status, rollout.reward) == (RolloutStatus.STEP_TIMEOUT, None)
    assert "step: no answer after 0.02 s" in rollout.cause
    assert factory.made[0].calls == ["reset", "step", "close"]
    assert len(rollout.turns) == 1  # what was sampled before is kept


@pytest.mark.parametrize(
    ("method", "error"),
    [("reset", ValueError("no")), ("step", SystemExit(3)), ("finish", asyncio.CancelledError())],
)
def test_an_environment_that_raises_ends_alone_with_a_cause(method, error):
    factory = Factory(raising(method, error), CountingEnv)
    broken, sound = run_rollouts(factory, size=2, max_turns=2)
    assert (broken.status, broken.reward) == (RolloutStatus.ENV_ERROR, None)
    assert method in broken.cause or "fail" in broken.cause
    assert type(error).__name__ in broken.cause
    assert (sound.status, sound.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert closes(factory) == [1, 1]


class NoFinish:
    reset, step, close = CountingEnv.reset, CountingEnv.step, CountingEnv.close


class NoClose:
    reset, step, finish = BlockingEnv.reset, BlockingEnv.step, BlockingEnv.finish


METHODS = "an environment has the methods reset, step, finish, close"


@pytest.mark.parametrize(
    ("maker", "cause"),
    [
        (NoFinish, f"NoFinish has no finish: {METHODS}"),
        (lambda: threaded(NoClose()), f"NoClose has no close: {METHODS}"),
        (lambda: None, "expected an environment, got None; does Task.environment return one?"),
        (
            answering("step", None),
            "step: expected an Observation or a Terminal, got None; does every path through it",
        ),
        (
            answering("reset", MessageObservation(messages=[])),
            "a MessageEnv is wrapped: MessageTokenEnv(MyEnv(), make_renderer(tokenizer))",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_mend(maker, cause):
    rollout = only(Factory(maker))
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert cause in rollout.cause


GARBAGE = [
    (1, 2),
    observation(prompt_token_ids=()),
    observation(prompt_token_ids=[1, -1]),
    observation(constraints={"logit_bias": {"5": 1.0}}),
    observation(max_tokens=0),
    observation(stop_token_ids=None),
    observation(stop=("",)),
    observation(num_logprobs=-1),
    observation(turn_reward="high"),
    observation(turn_text=7),
    Terminal(reward="1.0"),
    Terminal(status="completed"),
    Terminal(metrics={"right": "yes"}),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda garbage: repr(garbage)[:60])
def test_garbage_from_an_environment_ends_only_its_rollout_and_is_in_the_cause(garbage):
    factory = Factory(answering("step", garbage), CountingEnv)
    broken, sound = run_rollouts(factory, size=2)
    assert (broken.status, broken.reward) == (RolloutStatus.ENV_ERROR, None)
    assert "expected" in broken.cause
    assert len(broken.turns) == 1
    assert (sound.status, sound.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert closes(factory) == [1, 1]


def test_an_endless_prompt_ends_as_max_tokens_and_is_not_read_to_its_end():
    factory = Factory(answering("step", observation(prompt_token_ids=itertools.count(1))))
    rollout = only(factory, max_total_tokens=50)
    assert (rollout.status, rollout.reward) == (RolloutStatus.MAX_TOKENS, 0.125)


def test_numbers_of_other_libraries_become_python_numbers():
    terminal = Terminal(
        reward=np.float32(0.5), turn_reward=True, metrics={"n": np.int64(3), "none": None}
    )
    first = observation(prompt_token_ids=np.array([4, 5]), max_tokens=np.int32(2))

    class Numpy(CountingEnv):
        async def reset(self):
            return first

        async def step(self, completion):
            return terminal

    rollout = only(Factory(Numpy))
    (turn,) = rollout.turns
    values = [rollout.reward, turn.reward, rollout.metrics["n"]]
    assert values == [0.5, 1.0, 3.0]
    assert {type(value) for value in values} == {float}
    assert turn.prompt_token_ids == (4, 5)
    assert {type(token_id) for token_id in turn.prompt_token_ids} == {int}
    assert rollout.metrics == {"n": 3.0}


@pytest.mark.parametrize("method", ["step", "close"])
def test_a_rollout_does_not_wait_for_an_environment_that_ignores_its_cancellation(method):
    class Deaf(CountingEnv):
        pass

    async def hang(self, *args):
        self.calls.append(method)
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                self.calls.append("cancelled")

    async def scenario():
        factory = Factory(lambda: Deaf(turns=9), CountingEnv)
        rollouter = make_rollouter(factory, step_timeout_s=0.02, max_turns=2)
        group = await rollouter.run_group("g", PROBLEM, size=2, seed=0)
        released.set()
        return group

    hang.__name__ = method
    setattr(Deaf, method, hang)
    released = asyncio.Event()
    deaf, sound = asyncio.run(scenario()).rollouts
    expected = RolloutStatus.MAX_TURNS if method == "close" else RolloutStatus.STEP_TIMEOUT
    assert deaf.status is expected
    assert f"{method}: no answer" in deaf.cause
    assert sound.status is RolloutStatus.COMPLETED
