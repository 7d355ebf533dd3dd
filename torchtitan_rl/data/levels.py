"""A dataset with levels of difficulty: they rise with success, and fall without.

Invariants: only outcomes of the current level count. The state has the level, the outcomes that
count and the position in each level that was used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from torchtitan_rl.rollout.task import Dataset, Outcome
from torchtitan_rl.types import Problem


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """When the difficulty of a task changes."""

    enabled: bool = False
    """Begin at the lowest level and go by success. Otherwise the difficulty is fixed."""
    window: int = 16
    """Number of groups, the newest ones of the level, over which success is averaged."""
    raise_at: float = 0.7
    """Share of solved rollouts from which the level rises."""
    lower_at: float = 0.1
    """Share of solved rollouts up to which the level falls; below 0 it never does."""
    max_level: int = 5
    """Highest level, from 0. A task that has fewer stays at its own highest one."""


class LevelDataset:
    """Problems of the current level; ``make`` gives the dataset of a level."""

    def __init__(
        self, make: Callable[[int], Dataset], config: CurriculumConfig, *, max_level: int
    ) -> None:
        self._make = make
        self._config = config
        self._max_level = min(max_level, config.max_level)
        self._levels: dict[int, Dataset] = {}
        self._level = 0
        self._last = 0  # level of the problem that was returned last
        self._recent: deque[float] = deque(maxlen=config.window)

    @property
    def level(self) -> int:
        return self._level

    @property
    def epoch(self) -> int:
        return self._of_level(self._last).epoch

    def next(self) -> Problem:
        self._last = self._level
        return replace(self._of_level(self._level).next(), task=level_name(self._level))

    def record(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.solved is not None and outcome.problem.task == level_name(self._level):
                self._recent.append(outcome.solved)
                self._move()

    def metrics(self) -> Mapping[str, float]:
        return {"level": float(self._level)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "level": self._level,
            "last": self._last,
            "recent": list(self._recent),
            "levels": {str(level): one.state_dict() for level, one in self._levels.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._level, self._last = int(state["level"]), int(state["last"])
        self._recent.clear()
        self._recent.extend(state["recent"])
        for level, saved in state["levels"].items():
            self._of_level(int(level)).load_state_dict(saved)

    def _move(self) -> None:
        if len(self._recent) < self._config.window:
            return
        solved = fmean(self._recent)
        step = (solved >= self._config.raise_at) - (solved <= self._config.lower_at)
        if 0 <= self._level + step <= self._max_level and step:
            self._level += step
            self._recent.clear()

    def _of_level(self, level: int) -> Dataset:
        if level not in self._levels:
            self._levels[level] = self._make(level)
        return self._levels[level]


def level_name(level: int) -> str:
    return f"level{level}"
