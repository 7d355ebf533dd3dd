"""Environments with plain methods, through `threaded`."""

from __future__ import annotations

import threading

import pytest

from tests.fast.rollout.test_message_env import LetterRenderer
from tests.support.rollouts import BlockingEnv, CountingEnv, Factory, only
from torchtitan_rl.rollout.env import Terminal, threaded
from torchtitan_rl.rollout.message_env import MessageObservation, MessageTokenEnv
from torchtitan_rl.types import RolloutStatus


class Dialogue:
    """A `MessageEnv` with plain methods and a state."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.said = ""

    def reset(self):
        self.threads.add(threading.get_ident())
        return MessageObservation(messages=[{"role": "user", "content": "U"}])

    def step(self, message):
        self.said = message["content"]
        return Terminal(reward=1.0)

    def finish(self, status):
        return Terminal(reward=0.0)

    def close(self):
        self.threads.add(threading.get_ident())

    def state_dict(self):
        return self.said

    def load_state_dict(self, state):
        self.said = state


def test_plain_methods_of_token_and_message_environments_run_in_other_threads():
    env = Dialogue()
    rollout = only(Factory(lambda: MessageTokenEnv(threaded(env), LetterRenderer())))
    assert (rollout.status, rollout.reward, env.said) == ("completed", 1.0, "\x0b\x0c")
    assert threading.get_ident() not in env.threads
    assert only(Factory(lambda: threaded(BlockingEnv()))).status is RolloutStatus.COMPLETED


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: MessageTokenEnv(env, None)])
def test_plain_methods_without_the_wrapper_are_refused_with_the_fix(wrap):
    env = BlockingEnv()
    rollout = only(Factory(lambda: wrap(env)))
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "BlockingEnv.reset must be an async method; wrap" in rollout.cause
    assert env.calls == []


def test_async_methods_in_the_wrapper_are_refused():
    with pytest.raises(TypeError, match=r"threaded\(CountingEnv\): reset must be a plain method"):
        threaded(CountingEnv())
