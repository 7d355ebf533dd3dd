"""The reasoning-gym library: datasets by name, levels of their curricula, and scores.

A dataset is described by JSON (`MadeFrom`), so that the process that scores an answer makes the
same problems as the one that gave them. Only this module and `gym_score` know the library.

    python -m torchtitan_rl.environments.gym_datasets     # lists all tasks with their options
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, TypedDict

from torchtitan_rl.data.rows import DataError, Row, require

GYM_SCORE = "torchtitan_rl.environments.gym_score:gym_score"


class MadeFrom(TypedDict):
    """What a dataset is made from. A ``level`` sets the options that the task's curriculum knows;
    None has no curriculum."""

    name: str
    level: int | None
    options: dict[str, Any]
    seed: int
    size: int


class GymRows:
    """A dataset of reasoning-gym as `Rows`."""

    def __init__(self, made: MadeFrom, name: str) -> None:
        self.name = name
        self.blocks: Sequence[int] = (made["size"],)
        self.size = json.dumps(made, sort_keys=True)
        self._dataset = gym_dataset(made)
        self._task = made["name"]

    def number(self, block: int, index: int) -> int:
        return index

    def place(self, number: int) -> str:
        return f"{self._task}, problem {number}"

    def read(self, block: int, index: int) -> Row:
        try:
            entry = self._dataset[index]
        except Exception as error:  # of a hundred generators
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"{self.place(index)} cannot be made ({cause})") from error
        return {"question": entry["question"], "answer": str(entry["answer"]), "index": index}


def gym_dataset(made: MadeFrom) -> Any:
    """A dataset of the library; the same one for the same description.

    Raises:
        Exception: the library cannot make it, or its options are not JSON.
    """
    return _make(json.dumps(made, sort_keys=True))


@functools.lru_cache(maxsize=64)  # some read files, or make all of their problems
def _make(description: str) -> Any:
    gym = require("reasoning_gym", "reasoning-gym")
    made: MadeFrom = json.loads(description)
    options = made["options"]
    if made["level"] is not None:
        from reasoning_gym.factory import create_curriculum

        curriculum = create_curriculum(made["name"])
        curriculum.set_global_level(made["level"])
        config = curriculum.generate_configuration(options)
        options |= {
            key: getattr(config, key)
            for attribute in curriculum.attributes.values()
            for key in _fields_of(attribute)
        }
    return gym.create_dataset(
        made["name"], **{**options, "seed": made["seed"], "size": made["size"]}
    )


def max_level(name: str) -> int:
    """Of the task's curriculum."""
    from reasoning_gym.factory import create_curriculum

    attributes = create_curriculum(name).attributes.values()
    return max((len(attribute.levels) - 1 for attribute in attributes), default=0)


def _fields_of(attribute: Any) -> list[str]:
    names = ("field_name", "lower_field_name", "upper_field_name")
    return [getattr(attribute, name) for name in names if hasattr(attribute, name)]


def gym_names() -> dict[str, bool]:
    """All tasks, and whether each has a curriculum."""
    require("reasoning_gym", "reasoning-gym")
    from reasoning_gym.factory import DATASETS, has_curriculum

    return {name: has_curriculum(name) for name in DATASETS}


def main() -> None:
    """Print each task with its options and their defaults."""
    require("reasoning_gym", "reasoning-gym")
    from reasoning_gym.factory import DATASETS

    for name, has_levels in sorted(gym_names().items()):
        fields = dataclasses.fields(DATASETS[name][1])
        options = (one for one in fields if one.name not in ("seed", "size"))
        texts = (f"{one.name}={_default(one)!r}" for one in options)
        print(f"{name}({', '.join(texts)}){'' if has_levels else '  # no curriculum'}")


def _default(option: dataclasses.Field[Any]) -> Any:
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return option.default


if __name__ == "__main__":
    main()
