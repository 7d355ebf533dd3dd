"""A task: where problems come from, which environment each gets, and what scores the rollouts.

Tasks are dataclasses (their fields are command-line options) and are given in a config file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig
    from torchtitan_rl.rollout.env import TokenEnv
    from torchtitan_rl.rollout.rubric import Rubric

Split = Literal["train", "validation"]


class Dataset(Protocol):
    """An endless or finite sequence of problems with a position that can be saved."""

    def next(self) -> Problem:
        """The next problem; an endless dataset starts another epoch in another order."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch of the problem that `next` returned last."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position: a dataset that loads it goes on with the same problems."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """Base of a task's configuration; a subclass overrides the factories."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        """A problem's id is unique in the validation set, and within an epoch of the training set.

        Also called before the run starts, to look at the first problems; that one is thrown away.
        """
        raise NotImplementedError

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        """A fresh environment for one rollout. ``tokenizer`` is a `transformers` tokenizer.

        Called on the controller's event loop: slow set-up belongs into the environment's `reset`.
        ``limits`` are enforced by the rollouter; they are here for tasks that want to know them.
        """
        raise NotImplementedError

    def rubric(self) -> Rubric | None:
        """None where the environment's own reward is all."""
        return None

    def success_reward(self) -> float:
        """A rollout with at least this reward has solved its problem (pass@k)."""
        return 1.0 - 1e-9

    def errors(self) -> list[str]:
        """Validation of the task's own fields: one message each, naming field, value and fix."""
        return []
