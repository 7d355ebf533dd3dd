"""Environments of gymnasium (PyPI) whose actions can be written as text, as a `Task`. Their methods
block, so each call runs in a thread. What reads actions and writes observations depends only on
gymnasium's spaces.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torchtitan_rl.data.columns import fill
from torchtitan_rl.data.rows import require
from torchtitan_rl.environments.games import Game, GameTask, InvalidActionError, Move
from torchtitan_rl.errors import ConfigError, one_line
from torchtitan_rl.rollout.calls import in_thread

_SHORT_CHARS, _LONG_CHARS = 100, 1000  # lengths in error messages
_FEW = 20  # up to so many numbers are listed one by one
_NUMBERS: dict[str, tuple[type, ...]] = {"i": (int,), "u": (int,), "f": (int, float), "b": (bool,)}
# Exceptions raised by JSON of another shape.
_NO_ACTION = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_MARKED = re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class GymnasiumTask(GameTask):
    """An environment of gymnasium; a problem is the seed that it is reset with::

        GymnasiumTask(
            env_id="FrozenLake-v1",
            kwargs={"render_mode": "ansi", "is_slippery": False, "max_episode_steps": 20},
            action_names=("left", "down", "right", "up"),
        )

    All rollouts of a group have the same seed, and so the same start and the same random events.
    ``rollout.max_turns`` must leave room for all steps. Override `describe` for other observations,
    and `make` for other environments.
    """

    env_id: str
    """Name of the environment; ``my_module:Name-v0`` imports the module that registers it."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of `gymnasium.make`, such as ``max_episode_steps``."""
    action_names: tuple[str, ...] = ()
    """Names of the actions of a `Discrete` space, in their order. The policy may also answer with
    an action's number."""

    def make(self, seed: int) -> Any:
        """Make a new environment; called in a thread."""
        return require("gymnasium", "gymnasium").make(self.env_id, **self.kwargs)

    def describe(self, env: Any, observation: Any, info: Mapping[str, Any]) -> str:
        """The text for ``{observation}`` in the templates: with the ``render_mode`` ``ansi`` the
        rendered text, with a highlighted place in brackets. Called in a thread."""
        if env.render_mode == "ansi":
            return without_colours(env.render())
        return observation_text(observation)

    def name(self) -> str:
        return self.env_id

    def game(self, seed: int) -> Game:
        return GymnasiumGame(self, seed)

    def errors(self) -> list[str]:
        if found := super().errors():
            return found
        game = GymnasiumGame(self, self.data_seed)
        try:
            fields = game.begin()
            for name in ("system", "prompt", "reply"):
                fill(getattr(self, name), {**fields, "steps": 0}, f"task.{name}")
            wrong = _names_error(game.action_space, self.action_names)
        except ConfigError as error:
            return [f"task: {error}"]
        except Exception as error:  # environments raise any type
            cause, name = one_line(error)[:_LONG_CHARS], self.env_id[:_SHORT_CHARS]
            return [f"task.env_id={name!r}, seed {self.data_seed}: {cause}"]
        finally:
            game.end()
        return [f"task.action_names={self.action_names}: {wrong}"] if wrong else []


class GymnasiumGame:
    """A `Game`; the methods without ``async`` block, and run one at a time. `end` waits for a step
    that takes too long: few environments can be closed by another thread during a step."""

    def __init__(self, task: GymnasiumTask, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._env: Any = None
        self._lock = threading.Lock()

    @property
    def action_space(self) -> Any:
        return self._env.action_space

    async def reset(self) -> Mapping[str, Any]:
        return cast("Mapping[str, Any]", await in_thread(self.begin))

    async def step(self, action: str) -> Move:
        return cast("Move", await in_thread(self.play, action))

    async def close(self) -> None:
        await in_thread(self.end)

    def begin(self) -> Mapping[str, Any]:
        with self._lock:
            self._env = self._task.make(self._seed)
            observation, info = self._env.reset(seed=self._seed)
            return self._fields(observation, info, 0.0)

    def play(self, action: str) -> Move:
        with self._lock:
            chosen = read_action(self.action_space, self._task.action_names, action)
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
            "observation": self._task.describe(self._env, observation, info),
            "actions": actions_text(self.action_space, self._task.action_names),
            "reward": reward,
            "info": info,
        }


def actions_text(space: Any, names: Sequence[str]) -> str:
    """Describe the possible actions, for the prompt."""
    if names:
        return ", ".join(names)
    kind = type(space).__name__
    if kind == "Discrete":
        first, last = int(space.start), int(space.start + space.n - 1)
        numbers = range(first, last + 1)
        return ", ".join(map(str, numbers)) if len(numbers) <= _FEW else f"{first} to {last}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    return f"JSON, an element of {space}"


def read_action(space: Any, names: Sequence[str], text: str) -> Any:
    """Read an action from a text: a name, a number, JSON, or the text of a `Text` space; raises
    InvalidActionError if it is not an action of the space."""
    kind = type(space).__name__
    wanted = " ".join(text.split()).casefold()
    for number, name in enumerate(names):
        if " ".join(name.split()).casefold() == wanted:
            return space.start + number
    try:
        action = text if kind == "Text" else _from_json(space, json.loads(text))
        if space.contains(action):
            return action
    except _NO_ACTION:
        pass
    raise InvalidActionError(f"{_short(text)!r} is no action.")


def _names_error(space: Any, names: Sequence[str]) -> str | None:
    if not names:
        return None
    if type(space).__name__ != "Discrete":
        return f"the actions are {space}; names are for a Discrete space, leave them out"
    if len(names) != space.n:
        return f"there are {space.n} actions: give a name for each, in their order"
    if len({" ".join(name.split()).casefold() for name in names}) < len(names):
        return "two names are equal; give each action its own"
    return None


def observation_text(observation: Any) -> str:
    """Return an observation as text: a text is unchanged, any other observation becomes JSON.

    >>> observation_text({"hand": (7, 10)})
    '{"hand": [7, 10]}'
    """
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, default=_plain, ensure_ascii=False)


def without_colours(text: str) -> str:
    r"""Return the text as a terminal shows it: without escape sequences, and with highlighted parts
    in brackets.

    >>> without_colours("S\x1b[41mF\x1b[0mF")
    'S[F]F'
    """
    return _COLOUR.sub("", _MARKED.sub(r"[\1]", text)).strip("\n")


def _from_json(space: Any, value: Any) -> Any:
    """Convert JSON to the types that the space wants."""
    import numpy as np

    kind = type(space).__name__
    if kind == "Discrete":
        return _whole(value)
    if kind == "Text":
        return value
    if kind == "Dict":
        if value.keys() != space.spaces.keys():
            raise ValueError("other names")
        return {name: _from_json(space.spaces[name], value[name]) for name in space.spaces}
    if kind in ("Tuple", "Sequence", "OneOf", "Graph") and not isinstance(value, list):
        raise ValueError("not a list")
    if kind == "Tuple":
        return tuple(_from_json(one, part) for one, part in zip(space.spaces, value, strict=True))
    if kind == "Sequence":
        return _sequence(space, [_from_json(space.feature_space, part) for part in value])
    if kind == "OneOf":
        index, chosen = value
        return np.int64(_whole(index)), _from_json(space.spaces[index], chosen)
    if kind == "Graph":
        return _graph(space, *value)
    return _array(space, value)


def _sequence(space: Any, parts: list[Any]) -> Any:
    if not space.stack:
        return tuple(parts)
    from gymnasium.vector.utils import concatenate, create_empty_array

    feature = space.feature_space
    return concatenate(feature, parts, create_empty_array(feature, len(parts)))


def _graph(space: Any, nodes: Any, edges: Any, links: Any) -> Any:
    import numpy as np
    from gymnasium.spaces import GraphInstance

    return GraphInstance(
        _array(space.node_space, nodes),
        None if edges is None else _array(space.edge_space, edges),
        None if links is None else np.asarray([[_whole(end) for end in link] for link in links]),
    )


def _array(space: Any, value: Any) -> Any:
    """Make an array of exactly these numbers: no number is rounded, and text is not converted."""
    import numpy as np

    array = np.asarray(value, dtype=space.dtype)
    if not _all_of(_NUMBERS[array.dtype.kind], value):
        raise ValueError("other numbers")
    return array


def _all_of(kinds: Sequence[type], value: Any) -> bool:
    if isinstance(value, list):
        return all(_all_of(kinds, one) for one in value)
    return type(value) in kinds


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("not a whole number")
    return value


def _plain(value: Any) -> Any:
    """Convert numpy arrays and numbers to JSON types, and everything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _FEW * 3 else f"{text[: _FEW * 3]}..."
