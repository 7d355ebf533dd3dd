"""Problems made from rows or taken from a list, in a different order in each epoch.

Invariants: the id of a problem is the source and the number of its row (``train.jsonl:17``). The
order depends only on the seed and the epoch. In an epoch each row is read once. The blocks and the
rows within each block are shuffled separately, so each row group of a Parquet file is decoded once.
The state is a position; only the current row is in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from torchtitan_rl.data.rows import DataError, Row, Rows
from torchtitan_rl.rollout.task import Split
from torchtitan_rl.types import Problem

MakeProblem = Callable[[str, str, Row], Problem | None]
"""Makes a problem from a row's id, its place for error messages, and the row; None skips it."""

_ROUNDS = 4


class RowDataset:
    """Endless epochs over all rows for which ``make`` returns a problem. ``chosen_by`` names the
    options that select rows, for the error of an empty selection."""

    def __init__(
        self,
        sources: Sequence[Rows],
        make: MakeProblem,
        *,
        seed: int,
        shuffle: bool,
        chosen_by: str = "make",
    ) -> None:
        self._blocks = [
            (rows, block, start, rows.blocks[block])
            for rows in sources
            for block, start in enumerate(list(accumulate(rows.blocks, initial=0))[:-1])
        ]
        self._sizes = [rows.size for rows in sources]
        self.num_rows = sum(size for *_, size in self._blocks)  # of an epoch, skipped ones included
        self._make = make
        self._seed = seed
        self._shuffle = shuffle
        self._chosen_by = chosen_by
        self.epoch = 0  # the epoch of the row that was read last
        self._position = 0  # the number of rows read in that epoch
        self._order: tuple[list[int], list[int]] | None = None

    def at(self, number: int) -> Problem | None:
        """Move to row ``number`` of the endless sequence (from 0), and return its problem, or None
        if ``make`` skips the row or the line is empty. DataError: the row cannot be read or used,
        or there is none."""
        if not self.num_rows:
            raise DataError(f"no row in {', '.join(self._sizes)}; see {self._chosen_by}")
        epoch, position = divmod(number, self.num_rows)
        if epoch != self.epoch:
            self._move_to(epoch, position)
        self._position = position
        return self._problem_at(position)

    def next(self) -> Problem:
        """The next problem. DataError: a row cannot be read or used, or none is left."""
        for _ in range(2 * self.num_rows):
            if self._position == self.num_rows:
                self._move_to(self.epoch + 1, 0)
            problem = self._problem_at(self._position)
            self._position += 1
            if problem is not None:
                return problem
        files = ", ".join(self._sizes)
        raise DataError(f"no row is left of {self.num_rows} ({files}); see {self._chosen_by}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self._position,
            "seed": self._seed,
            "files": self._sizes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state``, in the order of the seed that ``state`` has.
        DataError: it was taken with other files."""
        if state["files"] != self._sizes:
            now, before = ", ".join(self._sizes), ", ".join(state["files"])
            why = "give the same files, or another name to start again"
            raise DataError(f"the data is {now}; the checkpoint is of {before}: {why}")
        self._seed = int(state["seed"])
        self._move_to(int(state["epoch"]), int(state["position"]))

    def _move_to(self, epoch: int, position: int) -> None:
        self.epoch, self._position = epoch, position
        self._order = None

    def _problem_at(self, position: int) -> Problem | None:
        if self._order is None:
            blocks = [self._shuffled(i, len(self._blocks), "") for i in range(len(self._blocks))]
            self._order = blocks, list(accumulate(self._blocks[block][3] for block in blocks))
        blocks, ends = self._order
        place = bisect_right(ends, position)
        rows, block, start, size = self._blocks[blocks[place]]
        within = position - (ends[place] - size)
        index = start + self._shuffled(within, size, f"{rows.name}/{block}")
        row = rows.read(index)
        if row is None:
            return None
        number = rows.first + index
        return self._make(f"{rows.name}:{number}", f"{rows.place} {number}", row)

    def _shuffled(self, position: int, size: int, block: str) -> int:
        if not self._shuffle:
            return position
        return shuffled(position, size, key=f"{self._seed}/{self.epoch}/{block}")


def split_of_rows(
    rows: Rows,
    split: Split,
    validation_share: float | None,
    *,
    text: Callable[[Row], str],
    seed: int,
    shuffle: bool = True,
    chosen_by: str = "task.num_problems and task.validation_share",
) -> RowDataset:
    """One split of ``rows``, whose data are problems, by `in_split` of ``text(row)``; all of them
    if ``validation_share`` is None."""

    def make(problem_id: str, place: str, row: Row) -> Problem | None:
        if validation_share is not None and not in_split(split, text(row), validation_share):
            return None
        return Problem(problem_id=problem_id, data=dict(row))

    return RowDataset(
        [rows], make, seed=seed, shuffle=shuffle and split == "train", chosen_by=chosen_by
    )


def in_split(split: Split, text: str, validation_share: float) -> bool:
    """Whether a problem belongs to a split; equal texts are in the same one."""
    digest = blake2b(text.encode(), digest_size=6).digest()
    is_validation = int.from_bytes(digest, "big") / 2**48 < validation_share
    return is_validation == (split == "validation")


class ListDataset(RowDataset):
    """Endless epochs over ``problems``, each in a different order. With ``shuffle=False`` (for
    validation) every epoch is in the list's order.

    >>> problems = [Problem(problem_id=f"sum/{n}", data={"question": f"{n} + 1?"}) for n in (1, 2)]
    >>> dataset = ListDataset(problems, seed=0, shuffle=False)
    >>> [dataset.next().problem_id for _ in range(3)], dataset.epoch
    (['sum/1', 'sum/2', 'sum/1'], 1)

    Raises:
        ValueError: ``problems`` is empty.
    """

    def __init__(self, problems: Sequence[Problem], *, seed: int, shuffle: bool = True) -> None:
        if not problems:
            raise ValueError("problems is empty: give at least one")
        listed = tuple(problems)
        rows = Rows(
            name="problems",
            size=f"a list of {len(listed)} problems",
            blocks=(len(listed),),
            read=lambda index: {"problem": listed[index]},
            place="problem",
        )
        super().__init__([rows], lambda *row: row[-1]["problem"], seed=seed, shuffle=shuffle)


def shuffled(position: int, size: int, *, key: str) -> int:
    """The image of ``position``, in ``range(size)``, under a permutation of this range, which
    depends only on ``key`` and ``size``, is the same on every machine, and takes no memory.

    A Feistel network permutes ``range(4**k)``, for the smallest such range that holds ``size``; an
    image outside of ``range(size)`` is permuted again (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002, method 2).

    >>> sorted(shuffled(position, 5, key="epoch 0") for position in range(5))
    [0, 1, 2, 3, 4]
    """
    assert 0 <= position < size
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    index = position
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            digest = blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = left << half | right
        if index < size:
            return index
