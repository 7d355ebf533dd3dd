"""A task: where problems come from, which environment each gets, and how rollouts are scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig
    from torchtitan_rl.rollout.env import TokenEnv
    from torchtitan_rl.rollout.rubric import Rubric

Split = Literal["train", "validation"]


class Dataset(Protocol):
    """A sequence of problems, usually endless, with a position that a checkpoint saves.

    >>> class Sums:
    ...     def __init__(self) -> None:
    ...         self._position = 0
    ...
    ...     @property
    ...     def epoch(self) -> int:
    ...         return (self._position - 1) // 100
    ...
    ...     def next(self) -> Problem:
    ...         number = self._position % 100
    ...         self._position += 1
    ...         return Problem(problem_id=str(number), data={"text": f"{number} + 1?"})
    ...
    ...     def state_dict(self) -> dict[str, Any]:
    ...         return {"position": self._position}
    ...
    ...     def load_state_dict(self, state: dict[str, Any]) -> None:
    ...         self._position = state["position"]
    >>> Sums().next().data["text"]
    '0 + 1?'
    """

    def next(self) -> Problem:
        """Return the next problem. After its last one, an endless dataset starts another epoch in
        another order; a finite one raises StopIteration."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch of the problem that `next` returned last, from 0."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the problem that would have been next when ``state`` was taken."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one training group. ``solved``: the share of its rollouts with a reward that
    solved the problem (`Task.success_reward`); None if no rollout has a reward."""

    problem: Problem
    solved: float | None


@runtime_checkable
class AdaptiveDataset(Dataset, Protocol):
    """A dataset that chooses problems by the outcomes of earlier ones.

    What it learns is part of its `state_dict`.
    """

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from outcomes. Called once a step, with the groups that were trained on or skipped
        since the last call; in the same order in every run with the same results. Also called
        within a step, when ``rollout.groups_per_step`` groups were skipped since the last call."""
        ...


@runtime_checkable
class MeasuredDataset(Dataset, Protocol):
    """A dataset with metrics, which each step's row has as ``dataset/*``."""

    def metrics(self) -> Mapping[str, float]:
        """The numbers that it chooses by, over all recorded outcomes."""
        ...


def adapts(dataset: Dataset) -> bool:
    """Whether it chooses by earlier outcomes. A dataset made of others always has `record`; its own
    ``adapts`` says whether one of them adapts."""
    return isinstance(dataset, AdaptiveDataset) and getattr(dataset, "adapts", True)


def metrics_of(dataset: Dataset) -> Mapping[str, float]:
    """The dataset's metrics; empty if it measures none."""
    return dataset.metrics() if isinstance(dataset, MeasuredDataset) else {}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on. A subclass overrides `dataset` and `environment`.

    It is a dataclass, whose fields are command-line options (``--task.digits 3``), and goes into
    ``RunConfig.task``::

        @dataclass(frozen=True, kw_only=True)
        class SumTask(Task):
            digits: int = 2  # of each number

            def dataset(self, split: Split, *, seed: int) -> Dataset:
                return Sums(split, seed=seed, digits=self.digits)

            def environment(
                self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig
            ) -> TokenEnv:
                return MessageTokenEnv(SumEnv(problem), make_renderer(tokenizer))

            def errors(self) -> list[str]:
                return [] if self.digits > 0 else [f"task.digits={self.digits}: must be above 0"]

    ``experiments/alphabet_sort/task.py`` is a complete one.
    """

    def __init_subclass__(cls) -> None:
        if "compared_as" in vars(cls):
            raise ConfigError(
                f"{cls.__name__}.compared_as: this method is named resume_identity now; rename it"
            )

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        """A problem's id is unique in the validation set, and in an epoch of the training set.

        Also called before the run starts, to check the first problems of a dataset that is not
        used otherwise.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override `dataset`")

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        """A new environment for one rollout. ``tokenizer`` is a `transformers` tokenizer.

        Called on the controller's event loop: slow set-up belongs in the environment's `reset`.
        ``limits`` are enforced elsewhere, and given for tasks that depend on them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override `environment`")

    def rubric(self) -> Rubric | None:
        """None if the environment's reward is the rollout's."""
        return None

    def success_reward(self) -> float:
        """A rollout with at least this reward has solved its problem (pass@k)."""
        return 1.0 - 1e-9

    def resume_identity(self) -> Mapping[str, Any]:
        """Values that a resumed run compares in the place of fields, by the field's name. A field
        that says where something is gives its contents; None: the field is not compared."""
        return {}

    def with_all_options(self) -> Task:
        """The same task, with an entry for each option that the command line may give: options only
        change entries that exist."""
        return self

    def errors(self) -> list[str]:
        """What is wrong with the task's fields: one message each with field, value and fix."""
        return []
