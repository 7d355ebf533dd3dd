"""Pools of difficulty: problems that teach nothing now rest, and are tried again later.

A problem whose rollouts nearly all solved it goes into the pool ``easy``, one that nearly none
solved into ``hard``; both rest for some epochs. Invariants: a problem is in at most one pool; the
pools are part of the state. To find the next problem at most 64 are read, so that the event loop is
not held up; if all of them rest, the last is given all the same.

Shuffled orders that take no memory: a permutation that is computed one position at a time.

Its key alone determines it, on every machine and with every version of every library, so the
position is all that a checkpoint has to hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from torchtitan_rl.rollout.task import AdaptiveDataset, Dataset, Outcome, metrics_of
from torchtitan_rl.types import Problem

_MOST_READ = 64


@dataclass(frozen=True, kw_only=True)
class RestConfig:
    """Which problems are left out, and for how long."""

    epochs: int = 0
    """Number of epochs that a problem is left out, after the one in which its rollouts showed that
    it is too easy or too hard; 0 leaves none out."""
    easy_at: float = 1.0
    """Share of solved rollouts from which a problem is too easy."""
    hard_at: float = 0.0
    """Share of solved rollouts up to which a problem is too hard."""


class RestingDataset:
    """The problems of ``source`` that do not rest. If all do, none is passed over, so that epochs
    take as long as before."""

    def __init__(self, source: Dataset, config: RestConfig) -> None:
        self._source = source
        self._config = config
        self._until: dict[str, dict[str, int]] = {"easy": {}, "hard": {}}
        self._num_read = 0  # problems of the epoch so far
        self._epoch_size: int | None = None  # of the epoch before; None in the first
        self._num_resting: int | None = None  # now; None: to be counted

    @property
    def epoch(self) -> int:
        return self._source.epoch

    def metrics(self) -> Mapping[str, float]:
        """``resting/easy`` and ``resting/hard``: how many problems rest in each pool."""
        own = {
            f"resting/{pool}": float(self._count(members)) for pool, members in self._until.items()
        }
        return {**own, **metrics_of(self._source)}

    def next(self) -> Problem:
        problem = self._read()
        for _ in range(_MOST_READ - 1):
            if not self._rests(problem.problem_id) or self._all_rest():
                break
            problem = self._read()
        return problem

    def record(self, outcomes: Sequence[Outcome]) -> None:
        self._num_resting = None
        for outcome in outcomes:
            for members in self._until.values():
                members.pop(outcome.problem.problem_id, None)
            if (pool := self._pool_of(outcome)) is not None:
                until = self._source.epoch + 1 + self._config.epochs
                self._until[pool][outcome.problem.problem_id] = until
        if isinstance(self._source, AdaptiveDataset):
            self._source.record(outcomes)

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": self._source.state_dict(),
            "pools": self._until,
            "num_read": self._num_read,
            "epoch_size": self._epoch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state["source"])
        self._until = {pool: dict(state["pools"][pool]) for pool in self._until}
        self._num_read = state.get("num_read", 0)
        self._epoch_size = state.get("epoch_size")
        self._num_resting = None

    def _read(self) -> Problem:
        epoch = self._source.epoch
        problem = self._source.next()
        if self._source.epoch != epoch:
            self._epoch_size, self._num_read, self._num_resting = self._num_read, 0, None
        self._num_read += 1
        return problem

    def _all_rest(self) -> bool:
        if self._num_resting is None:
            self._num_resting = sum(map(self._count, self._until.values()))
        return self._epoch_size is not None and self._num_resting >= self._epoch_size

    def _count(self, members: Mapping[str, int]) -> int:
        """Of those that rest now."""
        return sum(until > self._source.epoch for until in members.values())

    def _pool_of(self, outcome: Outcome) -> str | None:
        if outcome.solved is None:
            return None
        if outcome.solved >= self._config.easy_at:
            return "easy"
        return "hard" if outcome.solved <= self._config.hard_at else None

    def _rests(self, problem_id: str) -> bool:
        for members in self._until.values():
            if problem_id in members:
                if members[problem_id] > self._source.epoch:
                    return True
                del members[problem_id]
        return False


_ROUNDS = 4


def shuffled(position: int, size: int, *, key: str) -> int:
    """The image of ``position`` under a permutation of ``range(size)``.

    A Feistel network permutes the smallest square power of two that holds ``size``; images outside
    of the range are permuted again (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002, method 2).

    >>> sorted(shuffled(position, 5, key="epoch 0") for position in range(5))
    [0, 1, 2, 3, 4]

    Raises:
        ValueError: ``position`` is not in the range.
    """
    if not 0 <= position < size:
        raise ValueError(f"position {position} is not in range({size})")
    half = ((size - 1).bit_length() + 1) // 2
    index = position
    while True:
        index = _permute(index, half, key)
        if index < size:
            return index


def _permute(index: int, half: int, key: str) -> int:
    """Of ``2 * half`` bits."""
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for number in range(_ROUNDS):
        digest = blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half | right
