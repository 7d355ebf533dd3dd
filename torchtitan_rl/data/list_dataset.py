"""Problems of a list, in an order of its own for each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtitan_rl.data.order import shuffled
from torchtitan_rl.data.rows import DataError
from torchtitan_rl.types import Problem


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
