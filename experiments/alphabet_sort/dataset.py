"""Procedural problems: lists of names, one list a turn, without end and with a saved position.

Invariants: a problem depends on its split, its index and the sizes alone, never on the seed, so
``problem_id`` is stable across runs; the seed and the epoch decide only the order. No problem of
one split is in the other, because the names themselves decide the split (`_split_of`). No name
comes twice in a problem.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from experiments.alphabet_sort.names import NAMES
from torchtitan_rl.rollout.task import Split
from torchtitan_rl.types import Problem

_VALIDATION_SHARE = 8  # one in so many name lists belongs to validation


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSizes:
    """How many turns a problem has and how many names each brings; both ends included."""

    min_turns: int
    max_turns: int
    min_names: int
    max_names: int


def make_problem(split: Split, index: int, sizes: ProblemSizes) -> Problem:
    """Problem ``index`` of ``split``; ``data["turns"]`` holds one list of names for each turn."""
    rng = random.Random(f"alphabet_sort/{split}/{index}")
    while True:
        num_turns = rng.randint(sizes.min_turns, sizes.max_turns)
        counts = [rng.randint(sizes.min_names, sizes.max_names) for _ in range(num_turns)]
        names = rng.sample(NAMES, sum(counts))
        if _split_of(names) == split:
            break
    turns = [[names.pop() for _ in range(count)] for count in counts]
    return Problem(problem_id=f"alphabet_sort/{split}/{index}", data={"turns": turns})


def _split_of(names: list[str]) -> Split:
    digest = hashlib.sha256(" ".join(sorted(names)).encode()).digest()
    return "validation" if digest[0] % _VALIDATION_SHARE == 0 else "train"


class AlphabetSortDataset:
    """An endless sequence of epochs over ``num_problems`` problems.

    The train split is shuffled anew each epoch; validation keeps its order, so that its first n
    problems are always the same ones.
    """

    def __init__(self, split: Split, *, seed: int, sizes: ProblemSizes, num_problems: int) -> None:
        self._split = split
        self._seed = seed
        self._sizes = sizes
        self._num_problems = num_problems
        self._epoch = 0  # of the problem that was returned last
        self._position = 0  # problems of that epoch that were returned
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    def next(self) -> Problem:
        if self._position == self._num_problems:
            self._move_to(self._epoch + 1, 0)
        index = self._order[self._position]
        self._position += 1
        return make_problem(self._split, index, self._sizes)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, in the order of that run's seed."""
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
