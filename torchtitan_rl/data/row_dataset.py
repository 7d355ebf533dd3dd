"""Problems made of the rows of files, in an order of its own for each epoch.

Invariants: the id of a problem is the file and the number of its row (``train.jsonl:17``), whatever
the seed, the filters and the split are. The order depends on the seed and the epoch alone. In an
epoch each row is read once: the rows of a block follow each other, so that a row group is decoded
once; blocks are shuffled, and the rows within each. The state is a position; no row is in memory
but the one that is read.

Problems of a list, in an order of its own for each epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from torchtitan_rl.data.resting import shuffled
from torchtitan_rl.data.rows import DataError, Row, Rows
from torchtitan_rl.types import Problem

MakeProblem = Callable[[str, str, Row], Problem | None]
"""Of a row's id, its place for error messages, and the row; None passes it over."""


class RowDataset:
    """Endless epochs over all rows of which ``make`` makes a problem."""

    def __init__(
        self,
        files: Sequence[Rows],
        make: MakeProblem,
        *,
        seed: int,
        shuffle: bool,
        chosen_by: str = "make",
    ) -> None:
        """``chosen_by``: what decides which rows are problems, for the error if none is."""
        self._blocks = [
            (rows, block, size) for rows in files for block, size in enumerate(rows.blocks)
        ]
        self._sizes = [rows.size for rows in files]
        self._num_rows = sum(size for _, _, size in self._blocks)
        self._make = make
        self._seed = seed
        self._shuffle = shuffle
        self._chosen_by = chosen_by
        self._epoch = 0  # of the row that was read last
        self._position = 0  # rows of that epoch that were read
        self._order: tuple[list[int], list[int]] | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def next(self) -> Problem:
        """
        Raises:
            DataError: a row cannot be read or used, or none is left by the filters.
        """
        for _ in range(2 * self._num_rows):
            if self._position == self._num_rows:
                self._move_to(self._epoch + 1, 0)
            problem = self._problem_at(self._position)
            self._position += 1
            if problem is not None:
                return problem
        files = ", ".join(self._sizes)
        raise DataError(f"no row is left of {self._num_rows} ({files}); see {self._chosen_by}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "files": self._sizes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, in the order of that run's seed.

        Raises:
            DataError: the files are not those that the state was taken with.
        """
        if state["files"] != self._sizes:
            now, before = ", ".join(self._sizes), ", ".join(state["files"])
            raise DataError(
                f"the data is {now}; it was {before} when the checkpoint was written: give the "
                "same files, or another name to start anew"
            )
        self._seed = int(state["seed"])
        self._move_to(int(state["epoch"]), int(state["position"]))

    def _move_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = None

    def _problem_at(self, position: int) -> Problem | None:
        if self._order is None:
            blocks = [self._shuffled(i, len(self._blocks), "") for i in range(len(self._blocks))]
            self._order = blocks, list(accumulate(self._blocks[block][2] for block in blocks))
        blocks, ends = self._order
        place = bisect_right(ends, position)
        rows, block, size = self._blocks[blocks[place]]
        index = self._shuffled(position - (ends[place] - size), size, f"{rows.name}/{block}")
        row = rows.read(block, index)
        if row is None:
            return None
        number = rows.number(block, index)
        return self._make(f"{rows.name}:{number}", rows.place(number), row)

    def _shuffled(self, position: int, size: int, of: str) -> int:
        if not self._shuffle:
            return position
        return shuffled(position, size, key=f"{self._seed}/{self._epoch}/{of}")


class ListDataset:
    """Endless epochs over ``problems``, each epoch in another order; with ``shuffle=False`` in
    theirs, as validation wants it.

    >>> problems = [Problem(problem_id=f"sum/{n}", data={"question": f"{n} + 1?"}) for n in (1, 2)]
    >>> dataset = ListDataset(problems, seed=0, shuffle=False)
    >>> [dataset.next().problem_id for _ in range(3)], dataset.epoch
    (['sum/1', 'sum/2', 'sum/1'], 1)

    Raises:
        ValueError: there is no problem.
    """

    def __init__(self, problems: Sequence[Problem], *, seed: int, shuffle: bool = True) -> None:
        if not problems:
            raise ValueError("problems is empty: give at least one")
        self._problems = tuple(problems)
        self._seed = seed
        self._shuffle = shuffle
        self._taken = 0

    @property
    def epoch(self) -> int:
        return max(0, self._taken - 1) // len(self._problems)

    def next(self) -> Problem:
        epoch, position = divmod(self._taken, len(self._problems))
        self._taken += 1
        if self._shuffle:
            key = f"{self._seed}/{epoch}"
            position = shuffled(position, len(self._problems), key=key)
        return self._problems[position]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken, "seed": self._seed, "size": len(self._problems)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, in the order of that run's seed.

        Raises:
            DataError: the list had another length then.
        """
        if state["size"] != len(self._problems):
            raise DataError(
                f"the list has {len(self._problems)} problems; it had {state['size']} when the "
                "checkpoint was written: give the same ones, or another name to start anew"
            )
        self._taken, self._seed = int(state["taken"]), int(state["seed"])
