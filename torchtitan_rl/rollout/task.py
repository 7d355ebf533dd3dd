"""A task: the source of problems, the environment for each problem, and the scoring of rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

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
        """Return the next problem. After its last problem, an endless dataset starts another epoch
        in another order; a finite dataset raises StopIteration."""

    @property
    def epoch(self) -> int:
        """The epoch of the problem that `next` returned last, from 0."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON-compatible values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the problem that was next when ``state`` was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one training group. ``solved``: of the group's rollouts with a reward, the
    share that solved the problem (see `Task.success_reward`); None if no rollout has a reward."""

    problem: Problem
    solved: float | None


@runtime_checkable
class AdaptiveDataset(Dataset, Protocol):
    """A dataset that chooses problems by earlier outcomes, which are part of its `state_dict`."""

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from outcomes. Called once a step, with the groups that were trained on or skipped
        since the last call, in the same order in every run with the same results. Also called
        within a step, when ``rollout.groups_per_step`` groups were skipped since the last call."""


@runtime_checkable
class MeasuredDataset(Dataset, Protocol):
    """A dataset with metrics, which are logged at each step as ``dataset/*``."""

    def metrics(self) -> Mapping[str, float]:
        """Return the statistics by which the dataset chooses, over all recorded outcomes."""


def adapts(dataset: Dataset) -> bool:
    """Whether the dataset chooses problems by earlier outcomes. One composed of others always has
    the method `record`; its attribute ``adapts`` says whether a part adapts."""
    return isinstance(dataset, AdaptiveDataset) and getattr(dataset, "adapts", True)


def metrics_of(dataset: Dataset) -> Mapping[str, float]:
    """Return the dataset's metrics; empty if it has none."""
    return dataset.metrics() if isinstance(dataset, MeasuredDataset) else {}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task. A subclass overrides `dataset` and `environment`.

    The subclass is a dataclass whose fields are command-line options (``--task.digits 3``). Set an
    instance as ``RunConfig.task``::

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

    ``experiments/alphabet_sort/task.py`` is a complete example.
    """

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        """Return the problems of a split. Ids are unique in the validation set, and in an epoch of
        the training set. Also called before the run, to check the first problems."""
        raise NotImplementedError(f"{type(self).__name__} does not override `dataset`")

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        """Return a new environment for one rollout. ``tokenizer`` is a `transformers` tokenizer.
        Called on the controller's event loop: slow set-up belongs in the environment's `reset`.
        ``limits`` are enforced elsewhere; they are passed for tasks that depend on them."""
        raise NotImplementedError(f"{type(self).__name__} does not override `environment`")

    def rubric(self) -> Rubric | None:
        """Return the rubric that scores rollouts; None: the environment's reward is used."""
        return None

    def success_reward(self) -> float:
        """Return the smallest reward of a rollout that has solved its problem (for pass@k)."""
        return 1.0 - 1e-9

    def resume_identity(self) -> Mapping[str, Any]:
        """Return values that a resumed run compares instead of the task's fields, by field name,
        such as the contents of a file instead of its path. A field with None is not compared."""
        return {}

    def with_all_options(self) -> Task:
        """Return this task with an entry for each option that the command line may set: options
        only change existing entries."""
        return self

    def errors(self) -> list[str]:
        """Return the errors in the task's fields, each as a message with field, value and fix."""
        return []
