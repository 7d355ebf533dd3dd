"""The problems that a run begins with, and the errors in them.

Problems are identified by their ids: an evaluation rolls out each id once, and a training group is
named after the id and the epoch. So an id must not occur twice in the validation set, or in an
epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.environments.supervised import SupervisedTask
from torchtitan_rl.errors import ConfigError, one_line
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.rollout.task import Split, Task
from torchtitan_rl.types import Problem

_MAX_LOOKED_AT = 256  # training problems that are checked before the run


def find_problems(config: RunConfig) -> tuple[tuple[Problem, ...], list[str]]:
    """The problems of the evaluation, and the errors in the task or its problems."""
    if errors := config.task.errors():
        return (), errors
    if isinstance(config.task, SupervisedTask):
        return (), []
    try:
        return evaluation_problems(config), training_errors(config)
    except ConfigError as error:
        return (), [*error.errors, *training_errors(config)]


def supervised_task(config: RunConfig) -> SupervisedTask | None:
    """The conversations that a run trains on; None without any."""
    if isinstance(config.task, SupervisedTask):
        return config.task
    return SupervisedTask(data=config.examples) if config.examples.train else None


def row_errors(config: RunConfig, policy_dir: Path) -> tuple[list[str], list[str]]:
    """The errors in the rows of a run on conversations, or with a supervised loss, and notes about
    them."""
    task = supervised_task(config)
    if task is None:
        return [], []
    if errors := task.errors():
        return errors, []
    return task.row_errors(
        load_tokenizer(policy_dir),
        seed=config.seed,
        num_steps=config.num_steps,
        max_tokens=config.trainer.max_episode_tokens,
    )


def evaluation_problems(
    config: RunConfig, split: Split = "validation", *, option: str = "evaluation.num_problems"
) -> tuple[Problem, ...]:
    """The problems of the evaluation. They are the same at each evaluation and for each seed, so
    that runs can be compared. ``option`` is the option that sets the number of problems; error
    messages name it.

    Raises:
        ConfigError: the set has too few problems or a repeated id, or its dataset fails.
    """
    wanted = config.evaluation.num_problems
    if not wanted:
        return ()
    found = _first(config.task, split, wanted, seed=0)
    problems = [problem for problem, epoch in found if epoch == 0]
    ids = [problem.problem_id for problem in problems]
    size = len(set(ids))
    if size == wanted:
        return tuple(problems)
    if len(ids) < wanted or ids[size] == ids[0]:  # the dataset has ended, or starts again
        raise ConfigError(
            f"{option} is {wanted}: the {split} set has {size} problems; give at most that"
        )
    raise ConfigError(
        f"{option} is {wanted}: problem {_most_common(ids)} comes twice in the "
        f"{split} set; give each problem an id of its own"
    )


def training_errors(config: RunConfig) -> list[str]:
    """The errors in the first training problems. They are read from a separate dataset object."""
    needed = config.num_steps * config.rollout.groups_per_step
    wanted = min(needed, _MAX_LOOKED_AT)
    try:
        found = _first(config.task, "train", wanted, seed=config.seed)
    except ConfigError as error:
        return error.errors
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


def _first(task: Task, split: Split, wanted: int, *, seed: int) -> list[tuple[Problem, int]]:
    """The first ``wanted`` problems with their epochs, or all if the dataset ends before. Raises
    ConfigError if the task's own code raises an exception."""
    found: list[tuple[Problem, int]] = []
    try:
        dataset = task.dataset(split, seed=seed)
        while len(found) < wanted:
            problem = dataset.next()
            found.append((problem, dataset.epoch))
    except StopIteration:
        pass
    except Exception as error:
        if isinstance(error, NotImplementedError) and error.args:  # raised by `Task` itself
            raise ConfigError(f"task: {error}") from error
        name, cause = "training" if split == "train" else split, one_line(error)
        raise ConfigError(f"task: its {name} dataset cannot be read ({cause})") from error
    return found


def _most_common(names: Sequence[str]) -> str:
    return Counter(names).most_common(1)[0][0]
