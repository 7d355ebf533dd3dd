"""Procedural datasets: endless sequences of problems, each made from its index.

Invariants: a problem depends only on its split, its index and the task's options, so a
``problem_id`` is stable across runs. The seed and the epoch decide only the order.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, get_args

from torchtitan_rl import Problem, Split

MAX_PROBLEMS = 1 << 24  # problems of one epoch; their order is kept in memory
_VALIDATION_SHARE = 8  # one of 8 keys belongs to validation


def split_of(key: str) -> Split:
    """Return the split of all problems with this ``key``. So no two splits share a key."""
    digest = hashlib.sha256(key.encode()).digest()
    return "validation" if digest[0] % _VALIDATION_SHARE == 0 else "train"


def size_errors(task: Any) -> list[str]:
    """Return the errors in the numbers of problems that ``task`` has for its two datasets."""
    names = ("num_train_problems", "num_validation_problems")
    return [
        f"task.{name}={getattr(task, name)}: must be 1 to {MAX_PROBLEMS}"
        for name in names
        if not 1 <= getattr(task, name) <= MAX_PROBLEMS
    ]


class ProceduralDataset:
    """Endless epochs over the problems ``make(split, 0)`` to ``make(split, num_problems - 1)``.

    The train split is shuffled again in each epoch. The validation split keeps its order, so its
    first n problems are always the same.

    Raises:
        ValueError: ``split`` is not the name of a split.
    """

    def __init__(
        self, split: Split, *, seed: int, num_problems: int, make: Callable[[Split, int], Problem]
    ) -> None:
        if split not in get_args(Split):
            raise ValueError(f"split is {split!r}: give one of {', '.join(get_args(Split))}")
        self._split = split
        self._seed = seed
        self._num_problems = num_problems
        self._make = make
        self._epoch = 0  # the epoch of the problem that was returned last
        self._position = 0  # number of problems of that epoch that were returned
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    def next(self) -> Problem:
        if self._position == self._num_problems:
            self._move_to(self._epoch + 1, 0)
        index = self._order[self._position]
        self._position += 1
        return self._make(self._split, index)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state``, in the order of the seed that ``state`` has."""
        self._seed = int(state["seed"])
        self._move_to(int(state["epoch"]), int(state["position"]))

    def _move_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._num_problems))
        if self._split == "train":
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
