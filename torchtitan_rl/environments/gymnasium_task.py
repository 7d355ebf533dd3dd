"""Environments of gymnasium (PyPI) with actions that can be written, as a `Task`.

Each rollout has an environment of its own. Its methods block, so each call has a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.data.columns import fill
from torchtitan_rl.data.rows import require
from torchtitan_rl.environments.game_task import GameTask
from torchtitan_rl.environments.games import Game, Move
from torchtitan_rl.environments.gymnasium_spaces import (
    actions_text,
    names_error,
    observation_text,
    read_action,
    without_colours,
)
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.calls import in_thread

_SHORT_CHARS, _LONG_CHARS = 100, 1000  # of error messages

Describe = Callable[[Any, Any, Mapping[str, Any]], str]


@dataclass(frozen=True, kw_only=True)
class GymnasiumTask(GameTask):
    """An environment of gymnasium; a problem is the seed that it is reset with::

        GymnasiumTask(
            env_id="FrozenLake-v1",
            kwargs={"render_mode": "ansi", "is_slippery": False, "max_episode_steps": 20},
            action_names=("left", "down", "right", "up"),
        )

    Siblings have the same seed, so the same start and the same luck. ``rollout.max_turns`` must
    leave room for all steps. Override `describe` for other observations, `make` for other
    environments.
    """

    env_id: str
    """Name of the environment; ``my_module:Name-v0`` imports the module that registers it."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of `gymnasium.make`, such as ``max_episode_steps``."""
    action_names: tuple[str, ...] = ()
    """Names of the actions of a `Discrete` space, in their order. Numbers are understood, too."""

    def make(self, seed: int) -> Any:
        """A new environment; called in a thread."""
        return require("gymnasium", "gymnasium").make(self.env_id, **self.kwargs)

    def describe(self, env: Any, observation: Any, info: Mapping[str, Any]) -> str:
        """``{observation}`` of the templates; called in a thread. What the environment renders if
        its ``render_mode`` is ``ansi``, a highlighted place in brackets; else the observation."""
        if env.render_mode == "ansi":
            return without_colours(env.render())
        return observation_text(observation)

    def name(self) -> str:
        return self.env_id

    def game(self, seed: int) -> Game:
        return self._game(seed)

    def errors(self) -> list[str]:
        if found := super().errors():
            return found
        game = self._game(self.data_seed)
        try:
            fields = game.begin()
            for name in ("system", "prompt", "reply"):
                fill(getattr(self, name), {**fields, "steps": 0}, f"task.{name}")
            wrong = names_error(game.action_space, self.action_names)
        except ConfigError as error:
            return [f"task: {error}"]
        except Exception as error:  # of any environment
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            name = self.env_id[:_SHORT_CHARS]
            return [f"task.env_id={name!r}, seed {self.data_seed}: {cause[:_LONG_CHARS]}"]
        finally:
            game.end()
        return [f"task.action_names={self.action_names}: {wrong}"] if wrong else []

    def _game(self, seed: int) -> GymnasiumGame:
        return GymnasiumGame(lambda: self.make(seed), self.describe, self.action_names, seed)


class GymnasiumGame:
    """A `Game`; the methods without ``async`` block.

    One call at a time: `end` waits for a step that took too long, as few environments can be closed
    by another thread meanwhile.
    """

    def __init__(
        self, make: Callable[[], Any], describe: Describe, names: tuple[str, ...], seed: int
    ) -> None:
        self._make = make
        self._describe = describe
        self._names = names
        self._seed = seed
        self._env: Any = None
        self._lock = threading.Lock()

    @property
    def action_space(self) -> Any:
        return self._env.action_space

    async def reset(self) -> Mapping[str, Any]:
        fields: Mapping[str, Any] = await in_thread(self.begin)
        return fields

    async def step(self, action: str) -> Move:
        move: Move = await in_thread(self.play, action)
        return move

    async def close(self) -> None:
        await in_thread(self.end)

    def begin(self) -> Mapping[str, Any]:
        with self._lock:
            self._env = self._make()
            observation, info = self._env.reset(seed=self._seed)
            return self._fields(observation, info, 0.0)

    def play(self, action: str) -> Move:
        with self._lock:
            chosen = read_action(self._env.action_space, self._names, action)
            observation, reward, ended, truncated, info = self._env.step(chosen)
            return Move(
                fields=self._fields(observation, info, float(reward)),
                reward=float(reward),
                ended=bool(ended),
                truncated=bool(truncated),
            )

    def end(self) -> None:
        with self._lock:
            if self._env is not None:
                self._env.close()

    def _fields(self, observation: Any, info: Mapping[str, Any], reward: float) -> dict[str, Any]:
        return {
            "observation": self._describe(self._env, observation, info),
            "actions": actions_text(self._env.action_space, self._names),
            "reward": reward,
            "info": info,
        }
