"""The problems that a task gives, looked at before a run starts.

A problem's id is its name everywhere: an evaluation rolls each id out once, and a training group is
named after the id and the epoch. So no id may come twice in the validation set, or in an epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import one_line
from torchtitan_rl.rollout.task import Dataset, Split
from torchtitan_rl.types import Problem

_MAX_LOOKED_AT = 256  # of the training problems; the rest is found out when it comes
_T = TypeVar("_T")


class ProblemsError(Exception):
    """A task's dataset cannot be used; the message says why."""


def find_problems(config: RunConfig) -> tuple[tuple[Problem, ...], list[str]]:
    """The problems of the evaluation, and what is wrong with the task or with its problems."""
    if errors := config.task.errors():
        return (), errors
    try:
        return evaluation_problems(config), training_errors(config)
    except ProblemsError as error:
        return (), [str(error), *training_errors(config)]


def evaluation_problems(config: RunConfig, split: Split = "validation") -> tuple[Problem, ...]:
    """The same problems at each evaluation, and for each seed, so that runs compare.

    Raises:
        ProblemsError: the set has fewer, or its dataset fails.
    """
    wanted = config.evaluation.num_problems
    if not wanted:
        return ()
    dataset = _of_task(split, lambda: config.task.dataset(split, seed=0))
    problems = [problem for problem, epoch in _first(dataset, wanted, split) if epoch == 0]
    ids = [problem.problem_id for problem in problems]
    size = len(set(ids))
    if size == wanted:
        return tuple(problems)
    if len(ids) < wanted or ids[size] == ids[0]:  # it has ended, or starts again
        raise ProblemsError(
            f"evaluation.num_problems is {wanted}: the {split} set has {size} problems; give at "
            "most that"
        )
    raise ProblemsError(
        f"evaluation.num_problems is {wanted}: problem {_most_common(ids)} comes twice in the "
        f"{split} set; give each problem an id of its own"
    )


def training_errors(config: RunConfig) -> list[str]:
    """What is wrong with the first training problems. The dataset that is read is thrown away."""
    needed = config.num_steps * config.rollout.groups_per_step
    wanted = min(needed, _MAX_LOOKED_AT)
    try:
        dataset = _of_task("training", lambda: config.task.dataset("train", seed=config.seed))
        found = _first(dataset, wanted, "training")
    except ProblemsError as error:
        return [str(error)]
    if len(found) < wanted:
        return [
            f"num_steps is {config.num_steps}: with rollout.groups_per_step "
            f"{config.rollout.groups_per_step} it takes {needed} training problems, and the "
            f"dataset ends after {len(found)}; give fewer steps, or a dataset that starts again"
        ]
    names = [f"{problem.problem_id} of epoch {epoch}" for problem, epoch in found]
    if len(set(names)) < len(names):
        return [
            f"task is {type(config.task).__name__}: training problem {_most_common(names)} comes "
            "twice; give each problem of an epoch an id of its own, and count epochs"
        ]
    return []


def _first(dataset: Dataset, wanted: int, name: str) -> list[tuple[Problem, int]]:
    """The first problems with their epochs; fewer where the dataset ends before."""
    found: list[tuple[Problem, int]] = []
    while len(found) < wanted:
        try:
            problem = _of_task(name, dataset.next)
        except StopIteration:
            break
        found.append((problem, dataset.epoch))
    return found


def _of_task(name: str, call: Callable[[], _T]) -> _T:
    """What a task's own code returns. All that it raises, but a dataset's end, is one error."""
    try:
        return call()
    except StopIteration:
        raise
    except Exception as error:
        if isinstance(error, NotImplementedError) and error.args:  # of `Task`
            raise ProblemsError(f"task: {error}") from error
        cause = one_line(error)
        raise ProblemsError(f"task: its {name} dataset cannot be read ({cause})") from error


def _most_common(names: Sequence[str]) -> str:
    return Counter(names).most_common(1)[0][0]
