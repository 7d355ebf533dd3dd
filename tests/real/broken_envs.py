"""A config for ``torchtitan-rl train`` whose environments do what environments should not.

Problem by problem: one is fine, one hangs in a blocking call, one raises, one returns garbage, one
is always solved. ``--task.kinds`` chooses among them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from configs.alphabet_sort_tiny import config as tiny
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.env import Observation, Terminal, TokenEnv
from torchtitan_rl.rollout.task import Dataset, Split, Task
from torchtitan_rl.types import Completion, Problem, RolloutStatus


class Cycle:
    """Problems of one kind after another, for ever."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._kinds = kinds
        self._position = 0

    @property
    def epoch(self) -> int:
        return 0

    def next(self) -> Problem:
        kind = self._kinds[self._position % len(self._kinds)]
        self._position += 1
        return Problem(problem_id=f"{kind}-{self._position}", data={"kind": kind})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


class BrokenEnv:
    """One turn over a fixed prompt; plain (blocking) methods."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def reset(self) -> Any:
        return Observation(prompt_token_ids=(5, 6, 7, 8))

    def step(self, completion: Completion) -> Any:
        if self._kind == "hangs":
            time.sleep(3600)
        if self._kind == "raises":
            raise RuntimeError("this environment always raises")
        if self._kind == "garbage":
            return {"observation": None}
        if self._kind == "solved":
            return Terminal(reward=1.0)
        return Terminal(reward=sum(completion.token_ids) % 7 / 7)

    def finish(self, status: RolloutStatus) -> Any:
        return Terminal(reward=0.0)

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class BrokenTask(Task):
    kinds: tuple[str, ...] = ("fine", "hangs", "raises", "garbage", "solved")

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        return Cycle(self.kinds)

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        return BrokenEnv(problem.data["kind"])


config = replace(
    tiny,
    task=BrokenTask(),
    num_steps=2,
    rollout=replace(tiny.rollout, groups_per_step=5, group_size=4, step_timeout_s=2.0),
    evaluation=replace(tiny.evaluation, num_problems=0),
)
