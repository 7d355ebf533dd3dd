"""Datasets that choose problems by the success of earlier ones.

`LevelDataset` has levels of difficulty, which rise with success and fall with failure. Invariants:
only outcomes of the current level count; they and the position in each level are in the state.

`RestingDataset` leaves out problems for some epochs (the problems *rest*), then tries them again. A
problem goes into the pool ``easy`` if at least the share `easy_at` of its rollouts solved it, and
into ``hard`` if at most the share `hard_at` did. Invariants: a problem is in at most one pool; the
pools are part of the state. At most 64 problems are read to find the next one, so that the event
loop is not blocked; if all of these rest, the last one is returned nevertheless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from torchtitan_rl.bounds import Count, Positive
from torchtitan_rl.rollout.task import AdaptiveDataset, Dataset, Outcome, metrics_of
from torchtitan_rl.types import Problem

_MOST_READ = 64


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """When the difficulty of a task changes."""

    enabled: bool = False
    """Begin at the lowest level, and change the level by success. If False, the difficulty is
    fixed."""
    window: Positive = 16
    """Success is averaged over this number of groups, the newest ones of the level."""
    raise_at: float = 0.7
    """The level rises if at least this share of the rollouts is solved."""
    lower_at: float = 0.1
    """The level falls if at most this share of the rollouts is solved. With a value below 0 the
    level never falls."""
    max_level: Count = 5
    """Highest level; the lowest is 0. A task with fewer levels ends at its own highest level."""


class LevelDataset:
    """Problems of the current level; ``make`` returns the dataset of a level."""

    def __init__(
        self, make: Callable[[int], Dataset], config: CurriculumConfig, *, max_level: int
    ) -> None:
        self._make = make
        self._config = config
        self._max_level = min(max_level, config.max_level)
        self._levels: dict[int, Dataset] = {}
        self.level = 0
        self._last = 0  # level of the problem that was returned last
        self._recent: deque[float] = deque(maxlen=config.window)

    @property
    def epoch(self) -> int:
        return self._of_level(self._last).epoch

    def next(self) -> Problem:
        self._last = self.level
        return replace(self._of_level(self.level).next(), task=level_name(self.level))

    def record(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.solved is not None and outcome.problem.task == level_name(self.level):
                self._recent.append(outcome.solved)
                self._move()

    def metrics(self) -> Mapping[str, float]:
        return {"level": float(self.level)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "last": self._last,
            "recent": list(self._recent),
            "levels": {str(level): one.state_dict() for level, one in self._levels.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level, self._last = int(state["level"]), int(state["last"])
        self._recent.clear()
        self._recent.extend(state["recent"])
        for level, saved in state["levels"].items():
            self._of_level(int(level)).load_state_dict(saved)

    def _move(self) -> None:
        if len(self._recent) < self._config.window:
            return
        solved = fmean(self._recent)
        step = (solved >= self._config.raise_at) - (solved <= self._config.lower_at)
        if 0 <= self.level + step <= self._max_level and step:
            self.level += step
            self._recent.clear()

    def _of_level(self, level: int) -> Dataset:
        if level not in self._levels:
            self._levels[level] = self._make(level)
        return self._levels[level]


def level_name(level: int) -> str:
    return f"level{level}"


@dataclass(frozen=True, kw_only=True)
class RestConfig:
    """Which problems are left out, and for how long."""

    epochs: Count = 0
    """Number of epochs for which a problem is left out, after the epoch in which its rollouts
    showed that it is too easy or too hard. With 0, no problem is left out."""
    easy_at: float = 1.0
    """A problem is too easy if at least this share of its rollouts solved it."""
    hard_at: float = 0.0
    """A problem is too hard if at most this share of its rollouts solved it."""


class RestingDataset:
    """The problems of ``source`` that do not rest. If all problems rest, none of them is skipped,
    so that the epoch has as many problems as without rests."""

    def __init__(self, source: Dataset, config: RestConfig) -> None:
        self._source = source
        self._config = config
        self._until: dict[str, dict[str, int]] = {"easy": {}, "hard": {}}
        self._num_read = 0  # problems read in this epoch
        self._epoch_size: int | None = None  # size of the previous epoch; None in the first
        self._num_resting: int | None = None  # resting problems; None: must be counted

    @property
    def epoch(self) -> int:
        return self._source.epoch

    def metrics(self) -> Mapping[str, float]:
        """``resting/easy`` and ``resting/hard``: the number of problems that rest in each pool."""
        own = {f"resting/{pool}": float(self._count(one)) for pool, one in self._until.items()}
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
