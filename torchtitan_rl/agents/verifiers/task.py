"""Environments of verifiers (PyPI) as a `Task`: any that is installed, by its name.

The environment runs in a process of its own. Its episodes are agents of the run's endpoint, so the
tokens that are trained on are those that the engine sampled, whatever the environment does with
their text.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.agents.agent import Agent, AgentCall, AgentResult
from torchtitan_rl.agents.task import AgentTask
from torchtitan_rl.agents.verifiers.process import (
    EnvironmentSpec,
    environment_tasks,
    run_episode,
    start_environment,
)
from torchtitan_rl.data.row_dataset import RowDataset
from torchtitan_rl.data.rows import Row
from torchtitan_rl.data.splits import in_split
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.task import Dataset, Split
from torchtitan_rl.types import Problem


@dataclass(frozen=True, kw_only=True)
class VerifiersTask(AgentTask):
    """An environment of verifiers 0.4::

        VerifiersTask(env="gsm8k-v1", args={"taskset.split": "train", "agent.max_turns": 4})

    The reward of a rollout is that of its trace; rewards and metrics by name are task metrics.
    """

    env: str
    """Name of the installed environment, as ``vf-eval`` takes it: a taskset (``gsm8k-v1``), or an
    environment and a taskset (``user-sim+gsm8k-v1``)."""
    args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Options, named as ``vf-eval`` does after ``--env.``: ``{"taskset.split": "train"}``."""
    validation_args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Options of the validation set, in addition to ``args``. Empty: ``validation_share`` of the
    tasks."""
    validation_share: float = 0.1
    """Share of the tasks that are kept for validation where ``validation_args`` is empty. A task's
    data decides, so that equal tasks are in one split."""
    num_problems: int | None = None
    """Use only the first so many tasks; needed where the environment never runs out of them."""
    shuffle: bool = True
    """Whether training problems come in another order in each epoch; otherwise as in the
    environment."""
    python: str = ""
    """Interpreter that has verifiers and the environment. Empty: ``verifiers/bin/python`` in this
    virtual environment where ``make setup`` has made it, else this interpreter."""
    folders: tuple[str, ...] = ()
    """Folders of environments that are not installed."""
    variables: tuple[str, ...] = ()
    """Environment variables that its process gets, such as ``OPENAI_API_KEY`` for a judge. Of the
    others it gets PATH, HOME and what else every program needs, and no keys."""
    num_processes: int = 1
    """Processes that run the environment. More than one where its code computes for long."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        rows = TaskRows(self.env, environment_tasks(self._spec(split)))

        def make(problem_id: str, place: str, row: Row) -> Problem | None:
            if not self.validation_args:
                text = json.dumps({**row, "idx": None}, sort_keys=True)
                if not in_split(split, text, self.validation_share):
                    return None
            return Problem(problem_id=problem_id, data={"split": split, "task": row})

        return RowDataset(
            [rows],
            make,
            seed=seed,
            shuffle=self.shuffle and split == "train",
            chosen_by="task.args, task.num_problems and task.validation_share",
        )

    def agent(self, problem: Problem) -> Agent:
        return self.run

    async def prepare(self, problem: Problem) -> None:
        await start_environment(self._spec(problem.data["split"]), processes=self.num_processes)

    async def run(self, call: AgentCall) -> AgentResult:
        """One episode of the environment.

        Raises:
            VerifiersError: it failed.
        """
        request = {
            "task": call.problem.data["task"],
            "base_url": call.base_url,
            "api_key": call.api_key,
            "model": call.model,
        }
        spec = self._spec(call.problem.data["split"])
        answer = await run_episode(spec, request, processes=self.num_processes)
        return AgentResult(
            reward=answer["reward"],
            part_rewards=answer["part_rewards"],
            metrics=answer["metrics"],
            messages=tuple(answer["messages"]),
        )

    def errors(self) -> list[str]:
        found = []
        if not self.validation_args and not 0 < self.validation_share < 1:
            found.append(
                f"task.validation_share={self.validation_share}: must be between 0 and 1; or give "
                "task.validation_args"
            )
        for name in ("num_problems", "num_processes"):
            if (value := getattr(self, name)) is not None and value < 1:
                found.append(f"task.{name}={value}: must be at least 1")
        if missing := [name for name in self.variables if name not in os.environ]:
            found.append(f"task.variables has {', '.join(missing)}, not set here; export it")
        if self.python and shutil.which(self.python) is None:
            found.append(f"task.python={self.python!r:.200}: there is no such program")
        if found:
            return found
        splits: dict[Split, str] = {"train": "args"}
        if self.validation_args:
            splits["validation"] = "validation_args"
        for split, name in splits.items():
            try:
                environment_tasks(self._spec(split))
            except ConfigError as error:
                found.append(f"task.env is {self.env!r:.100} with task.{name}: {error!s:.1000}")
        return found

    def _spec(self, split: Split) -> EnvironmentSpec:
        more = self.validation_args if split == "validation" else {}
        return EnvironmentSpec(
            env=self.env,
            args={**self.args, **more},
            num_problems=self.num_problems,
            python=self.python,
            folders=self.folders,
            variables=self.variables,
        )


class TaskRows:
    """The data of an environment's tasks as `Rows`."""

    def __init__(self, env: str, tasks: Sequence[Mapping[str, Any]]) -> None:
        self.name = env
        self.blocks: Sequence[int] = (len(tasks),)
        self.size = f"{env}: {len(tasks)} tasks"
        self._tasks = tasks

    def number(self, block: int, index: int) -> int:
        return index

    def place(self, number: int) -> str:
        return f"{self.name}, task {number}"

    def read(self, block: int, index: int) -> Row:
        return self._tasks[index]
