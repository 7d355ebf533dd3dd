"""Environments of gymnasium as tasks: actions, observations, seeds, threads, and errors."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.environments.games import InvalidActionError, Move
from torchtitan_rl.environments.gymnasium_task import (
    GymnasiumTask,
    actions_text,
    observation_text,
    read_action,
    without_colours,
)

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces

NAMES = ("left", "down", "right", "up")
LAKE = GymnasiumTask(
    env_id="FrozenLake-v1",
    kwargs={"render_mode": "ansi", "is_slippery": False, "max_episode_steps": 7},
    action_names=NAMES,
)


def play(task: GymnasiumTask, seed: int, *actions: str) -> tuple[Any, list[Move]]:
    """The fields of the first observation, and what came of each action."""

    async def rollout() -> tuple[Any, list[Move]]:
        game = task.game(seed)
        first = await game.reset()
        moves = [await game.step(action) for action in actions]
        await game.close()
        return first, moves

    return asyncio.run(rollout())


def test_a_map_is_text_and_names_are_actions() -> None:
    assert LAKE.errors() == []
    first, moves = play(LAKE, 0, "Down", "down", " right ", "1", "right", "right")
    assert first["observation"] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert first["actions"] == "left, down, right, up"
    assert moves[0].fields["observation"].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [move.reward for move in moves] == [0, 0, 0, 0, 0, 1]
    assert moves[-1].ended
    assert not moves[-1].truncated


SPACES = [
    spaces.Discrete(4),
    spaces.Discrete(4, start=-1),
    spaces.MultiDiscrete([3, 2]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2,)),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (1,)))),
    spaces.Dict({"move": spaces.Discrete(3), "say": spaces.Text(3)}),
    spaces.Text(5),
    spaces.Box(0, 255, (2,), dtype="uint8"),
    spaces.Sequence(spaces.Discrete(3)),
    spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    spaces.OneOf((spaces.Discrete(3), spaces.Text(5))),
    spaces.Graph(spaces.Discrete(3), spaces.Box(0, 1, (1,))),
]


@given(st.sampled_from(SPACES), st.text() | st.from_regex(r"[-\[\]{}0-9.,e\"]*"))
def test_any_text_is_an_action_of_the_space_or_refused(space: Any, text: str) -> None:
    names = NAMES if isinstance(space, spaces.Discrete) else ()
    try:
        action = read_action(space, names, text)
    except InvalidActionError:
        return
    assert space.contains(action)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_action_of_a_space_can_be_written(space: Any) -> None:
    space.seed(0)
    action = space.sample()
    text = action if isinstance(space, spaces.Text) else observation_text(action)
    read = read_action(space, (), text)
    assert observation_text(read) == observation_text(action)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.MultiDiscrete([2, 3]), "[0.9, 1.7]"),
        (spaces.MultiDiscrete([2, 3]), "[true, 1]"),
        (spaces.MultiBinary(2), '["1", "0"]'),
        (spaces.Box(0, 255, (2,), dtype="uint8"), "[0.5, 3]"),
        (spaces.Box(0, 1, (1,)), '["0.5"]'),
        (spaces.Tuple((spaces.Discrete(3), spaces.Discrete(2))), "[0, 1, 7]"),
        (spaces.Dict({"a": spaces.Discrete(3)}), '{"a": 1, "b": 2}'),
        (spaces.OneOf((spaces.Discrete(3), spaces.Text(5))), "[true, 1]"),
        (spaces.OneOf((spaces.Discrete(3), spaces.Text(5))), "[-1, 1]"),
        (spaces.Graph(spaces.Discrete(3), spaces.Box(0, 1, (1,))), "[3, null, null]"),
        (spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True), "[0.5]"),
    ],
    ids=str,
)
def test_what_is_nearly_an_action_is_not_made_one(space: Any, text: str) -> None:
    with pytest.raises(InvalidActionError):
        read_action(space, (), text)


def test_what_can_be_chosen_is_said() -> None:
    assert actions_text(spaces.Discrete(3, start=1), ()) == "1, 2, 3"
    assert actions_text(spaces.Discrete(300), ()) == "0 to 299"
    assert actions_text(spaces.Text(5), ()) == "a text of 1 to 5 characters"
    assert actions_text(spaces.MultiBinary(2), ()) == "JSON, an element of MultiBinary(2)"
    assert read_action(spaces.Discrete(3, start=1), ("a", "b", "c"), "B") == 2
    assert without_colours("\x1b[34;1mR\x1b[0m|\x1b[43m \x1b[0m|") == "R|[ ]|"


def test_a_step_blocks_a_thread_and_closing_waits_for_it() -> None:
    class Slow(gymnasium.Env[Any, Any]):
        action_space = observation_space = spaces.Discrete(1)
        may_go, calls = threading.Event(), []  # type: ignore[var-annotated]

        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            return 0, {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.may_go.wait()
            self.calls.append("step")
            return 0, 0.0, True, False, {}

        def close(self) -> None:
            self.calls.append("close")

    class SlowTask(GymnasiumTask):
        def make(self, seed: int) -> Any:
            return Slow()

    async def rollout() -> None:
        game = SlowTask(env_id="slow").game(0)
        await game.reset()
        step = asyncio.ensure_future(game.step("0"))
        close = asyncio.ensure_future(game.close())
        await asyncio.sleep(0.01)
        assert not step.done()
        assert not close.done()
        Slow.may_go.set()
        await asyncio.gather(step, close)

    asyncio.run(rollout())
    assert Slow.calls == ["step", "close"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_id": "FrozenLak-v1"}, "task.env_id='FrozenLak-v1', seed 0: .*FrozenLake"),
        ({"kwargs": {"size": 4}}, "task.env_id='FrozenLake-v1', seed 0: TypeError: .*size"),
        ({"action_names": ("a", "b")}, r"task.action_names=\('a', 'b'\): there are 4 actions"),
        ({"action_names": ("a", "b", "A", "c")}, "task.action_names=.*: two names are equal"),
        ({"prompt": "{board}"}, "task.env_id=.*task.prompt: no column 'board'; it has obs"),
    ],
)
def test_what_is_wrong_is_said_before_the_run(changes: dict[str, Any], message: str) -> None:
    (error,) = replace(LAKE, **changes).errors()
    assert re.match(message, error), error
