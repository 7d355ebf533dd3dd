"""Actions and observations of gymnasium as text, and back. Knows spaces, not environments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from torchtitan_rl.environments.games import InvalidActionError

_FEW = 20  # numbers that are listed one by one
_NUMBERS: dict[str, tuple[type, ...]] = {  # by numpy's kinds
    "i": (int,),
    "u": (int,),
    "f": (int, float),
    "b": (bool,),
}
_NO_ACTION = (  # what JSON of another shape raises
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
)
_MARKED = re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def actions_text(space: Any, names: Sequence[str]) -> str:
    """What can be chosen: for the prompt."""
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
    """The action that a text stands for: a name, a number, or JSON; of a `Text` space the text.

    Raises:
        InvalidActionError: it is none of the space.
    """
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


def names_error(space: Any, names: Sequence[str]) -> str | None:
    """Whether the names fit the space; None if they do."""
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
    """
    >>> observation_text({"hand": (7, 10)})
    '{"hand": [7, 10]}'
    """
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, default=_plain, ensure_ascii=False)


def without_colours(text: str) -> str:
    r"""What a terminal would show; a highlighted piece is in brackets.

    >>> without_colours("S\x1b[41mF\x1b[0mF")
    'S[F]F'
    """
    return _COLOUR.sub("", _MARKED.sub(r"[\1]", text)).strip("\n")


def _from_json(space: Any, value: Any) -> Any:
    """With the types that the space wants."""
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
    """Of numbers as they are: none is rounded, and no text is read as one."""
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
    """Of numpy arrays and numbers, and what else is no JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _FEW * 3 else f"{text[: _FEW * 3]}..."
