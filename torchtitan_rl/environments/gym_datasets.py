"""The reasoning-gym library: datasets by name, and levels of their curricula.

Some tasks depend on the order of sets, and so on the interpreter's hash seed. So problems are made
only in processes with a fixed hash seed: that of `call_gym` and those that score answers. Only this
module and `gym_score` use the library.

    python -m torchtitan_rl.environments.gym_datasets     # lists all tasks with their options
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from typing import IO, Any, TypedDict, cast

import numpy

from torchtitan_rl.data.rows import Row, require
from torchtitan_rl.errors import ConfigError, TorchtitanRLError

GYM_SCORE = "torchtitan_rl.environments.gym_score:gym_scorer"


class MadeFrom(TypedDict):
    """The description of a dataset. ``level`` sets the options that the task's curriculum controls;
    None: no curriculum is used."""

    name: str
    level: int | None
    options: dict[str, Any]
    seed: int
    size: int


class GymError(TorchtitanRLError):
    """An error that the library raised, in one line."""


class _Process:
    """Runs `_serve` in a process, which is started again if it has ended. The process ends when its
    standard input is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def call(self, function: str, *args: Any) -> Any:
        """Call a function of this module in the process with the fixed hash seed. Arguments and
        result are JSON. Raises GymError: the function raised an error, or the process ended; or
        ConfigError: reasoning-gym is not installed."""
        line = json.dumps([function, args])
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            try:
                cast("IO[str]", self._process.stdin).write(f"{line}\n")
                answer = json.loads(cast("IO[str]", self._process.stdout).readline())
            except (OSError, ValueError) as error:
                raise GymError("the process that makes problems has ended") from error
        if "error" in answer:
            raise (ConfigError if answer["is_config"] else GymError)(answer["error"])
        return answer["result"]

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(path for path in sys.path if path)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import _serve; _serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            encoding="utf-8",
            errors="surrogatepass",
            bufsize=1,
            start_new_session=True,  # Ctrl-C goes only to the controller
        )


call_gym = _Process().call


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="surrogatepass")
    os.dup2(2, 1)  # some tasks print to stdout
    for line in sys.stdin:
        function, args = json.loads(line)
        try:
            answer = {"result": globals()[function](*args)}
        except Exception as error:  # a hundred generators raise any type
            is_config = isinstance(error, ConfigError)
            name = "" if is_config else f"{type(error).__name__}: "
            answer = {"error": name + " ".join(str(error).split()), "is_config": is_config}
        answers.write(json.dumps(answer) + "\n")


def question_digest(question: str) -> str:
    return hashlib.sha256(question.encode(errors="surrogatepass")).hexdigest()


def gym_row(made: MadeFrom, index: int) -> Row:
    """Return a problem as a row."""
    entry = gym_entry(made, index)
    return {"question": entry["question"], "answer": str(entry["answer"]), "index": index}


def gym_entry(made: MadeFrom, index: int) -> Any:
    """Make a problem in the library's format. It does not depend on problems made before."""
    dataset = gym_dataset(made)
    random.seed(index)  # some programs of codeio draw from these global generators
    numpy.random.seed(index)
    return dataset[index]


def check_dataset(made: MadeFrom) -> None:
    gym_dataset(made)


def gym_dataset(made: MadeFrom) -> Any:
    """Return the library's dataset for ``made``; raises its error if it cannot make it."""
    return _make(json.dumps(made, sort_keys=True))


@functools.lru_cache(maxsize=64)  # some datasets read files, or make all their problems at once
def _make(description: str) -> Any:
    gym = require("reasoning_gym", "reasoning-gym")
    made: MadeFrom = json.loads(description)
    options = made["options"]
    if made["level"] is not None:
        from reasoning_gym.factory import create_curriculum

        curriculum = create_curriculum(made["name"])
        curriculum.set_global_level(made["level"])
        config = curriculum.generate_configuration(options)
        keys = [key for one in curriculum.attributes.values() for key in _fields_of(one)]
        options |= {key: getattr(config, key) for key in keys}
    return gym.create_dataset(
        made["name"], **options | {"seed": made["seed"], "size": made["size"]}
    )


def max_level(name: str) -> int:
    """The highest level of the task's curriculum."""
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
