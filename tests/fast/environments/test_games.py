"""Games in messages: invalid answers, rewards, seeds as problems, and errors of the fields."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from torchtitan_rl.environments.games import Game, GameEnv, GameTask, InvalidActionError, Move
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.message_env import MessageObservation
from torchtitan_rl.types import RolloutStatus


class Countdown:
    """Take 1 or 2 from a number until nothing is left; each step earns what it takes."""

    def __init__(self, start: int, *, limit: int = 9) -> None:
        self.left = start
        self.limit = limit  # of steps
        self.is_closed = False

    async def reset(self) -> Mapping[str, Any]:
        return self._fields()

    async def step(self, action: str) -> Move:
        if action not in ("1", "2"):
            raise InvalidActionError(f"{action!r} is no action.")
        self.left -= int(action)
        self.limit -= 1
        return Move(
            fields=self._fields(),
            reward=float(action),
            ended=self.left <= 0,
            truncated=self.limit == 0,
        )

    async def close(self) -> None:
        self.is_closed = True

    def _fields(self) -> dict[str, Any]:
        return {"observation": f"{self.left} left", "actions": "1, 2"}


@dataclass(frozen=True, kw_only=True)
class CountdownTask(GameTask):
    def name(self) -> str:
        return "countdown"

    def game(self, seed: int) -> Game:
        return Countdown(seed)


TASK = CountdownTask(
    system="",
    prompt="{observation}; one of {actions}",
    reply="after {steps}: {observation}",
    invalid_reply="{error} Still {observation}.",
    answer_pattern="I take (.*)",
    invalid_reward=-0.25,
)


def play(env: GameEnv, *answers: str) -> list[Any]:
    """The messages of the environment, and the end."""

    async def rollout() -> list[Any]:
        heard: list[Any] = [text_of(await env.reset())]
        for answer in answers:
            said = await env.step({"role": "assistant", "content": answer})
            heard.append(said if isinstance(said, Terminal) else text_of(said))
        return heard

    return asyncio.run(rollout())


def text_of(observation: MessageObservation) -> str:
    (message,) = observation.messages
    assert message["role"] == "user"
    return str(message["content"])


def test_observations_become_messages_and_rewards_add_up() -> None:
    *heard, end = play(GameEnv(TASK, Countdown(3)), "I take 1", "so... I take 2")
    assert heard == ["3 left; one of 1, 2", "after 1: 2 left"]
    assert (end.reward, end.turn_reward) == (3.0, 2.0)
    assert end.metrics == {"game_steps": 2, "invalid_actions": 0, "truncated": 0}


def test_an_invalid_action_is_answered_counted_and_takes_no_step() -> None:
    *heard, end = play(GameEnv(TASK, Countdown(2)), "two", "I take 7", "I take 2")
    assert heard[1] == ("The answer has no action in the form that was asked for. Still 2 left.")
    assert heard[2] == "'7' is no action. Still 2 left."
    assert end.reward == 2.0 - 2 * 0.25
    assert end.metrics == {"game_steps": 1, "invalid_actions": 2, "truncated": 0}


def test_a_limit_of_the_game_or_the_rollout_leaves_the_reward_so_far() -> None:
    *_, end = play(GameEnv(TASK, Countdown(9, limit=2)), "I take 1", "I take 1")
    assert (end.reward, end.metrics["truncated"]) == (2.0, 1.0)
    env = GameEnv(TASK, Countdown(9))
    play(env, "I take 1", "no")
    end = asyncio.run(env.finish(RolloutStatus.MAX_TURNS))
    assert (end.reward, end.metrics["truncated"]) == (0.75, 1.0)


@pytest.mark.parametrize(
    ("reward", "total"), [("sum", 7.0), ("last", 4.0), ("discounted", 1 + 1 + 1)]
)
def test_rewards_of_steps_make_that_of_the_rollout(reward: Any, total: float) -> None:
    task = CountdownTask(reward=reward, discount=0.5, invalid_reward=-1.0)
    assert task.total([1.0, 2.0, 4.0], 0) == total
    assert task.total([1.0, 2.0, 4.0], 2) == total - 2
    assert task.total([], 0) == 0.0


def test_each_problem_is_a_seed_and_the_splits_have_none_in_common() -> None:
    task = CountdownTask(num_problems=40, data_seed=100, validation_share=0.25)
    seeds = {}
    for split in ("train", "validation"):
        data = task.dataset(split, seed=0)
        found = []
        while data.epoch == 0:
            found.append(data.next())
        found.pop()  # of the next epoch
        assert all(one.problem_id == f"countdown:{one.data['seed']}" for one in found)
        seeds[split] = {one.data["seed"] for one in found}
    assert seeds["train"] | seeds["validation"] == set(range(100, 140))
    assert not seeds["train"] & seeds["validation"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer_pattern": "("}, "task.answer_pattern='(': not a regular expression"),
        ({"reply": "{"}, "task.reply='{': "),
    ],
)
def test_an_error_names_the_field(changes: dict[str, Any], message: str) -> None:
    (error,) = replace(CountdownTask(), **changes).errors()
    assert error.startswith(message)
