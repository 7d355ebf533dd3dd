"""The procedural tasks of reasoning-gym (PyPI) as a `Task`: any of them by name, or a mixture.

A problem is made from its index, in a process with a fixed hash seed. The task's ``score_answer``
runs in the sandbox: it may evaluate the answer as code and compute for long.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from torchtitan_rl.bounds import CallSeconds, Count, OpenShare
from torchtitan_rl.data.columns import pattern_errors
from torchtitan_rl.data.curriculum import CurriculumConfig, LevelDataset, level_name
from torchtitan_rl.data.row_dataset import split_of_rows
from torchtitan_rl.data.rows import DataError, Row, Rows
from torchtitan_rl.environments.gym_datasets import (
    GYM_SCORE,
    GymError,
    MadeFrom,
    call_gym,
    question_digest,
)
from torchtitan_rl.environments.mixture import MixtureDataset
from torchtitan_rl.environments.question import QuestionEnv, as_messages
from torchtitan_rl.environments.scoring import checked_score, checker_sandbox, extract, run_checker
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.message_env import MessageTokenEnv
from torchtitan_rl.rollout.rendering import RendererKind, Thinking, make_renderer
from torchtitan_rl.rollout.task import Dataset, Split, Task
from torchtitan_rl.sandbox.sandbox import SandboxConfig
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class ReasoningGymTask(Task):
    """Tasks of reasoning-gym with their weights::

        ReasoningGymTask(
            tasks={"chain_sum": 2.0, "spell_backward": 1.0},
            options={"chain_sum": {"max_terms": 3, "max_digits": 2}},
        )

    ``python -m torchtitan_rl.environments.gym_datasets`` lists all names with their options.
    """

    tasks: dict[str, float]
    """Names of the tasks, each with its weight in the mixture."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of the tasks, by name. A curriculum replaces the options that it controls."""
    num_problems: Annotated[int, Interval(ge=1, le=1_000_000)] = 10_000  # some make all at once
    """Problems of each task (and of each level) in an epoch, those for validation included."""
    validation_share: OpenShare = 0.1
    """Share of the problems that are kept for validation. The text of the question decides, so that
    equal questions are in one split."""
    data_seed: Count = 42
    """Seed with which the problems are made; the run's seed decides only their order."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Use the tasks' own curricula for the difficulty. The validation set then has equal shares of
    all levels."""
    system: str = (
        "Think step by step, then write the final answer, and nothing else, between <answer> and "
        "</answer>."
    )
    """The system message. Empty: there is none."""
    answer_pattern: str = r"(?s)<answer>(.*?)</answer>"
    """Regular expression whose last match in a completion is its answer. If the expression has
    groups, the first group of the match is the answer. Empty: the whole completion. A completion
    without a match scores 0."""
    check_timeout_s: CallSeconds = 10.0
    """Seconds for scoring one answer; an answer that takes longer scores 0."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Where answers are scored."""
    renderer: RendererKind = "auto"
    """How messages become tokens; ``auto`` chooses the renderer that fits the model."""
    thinking: Thinking = "off"
    """How Qwen3 thinks: ``off`` prefills an empty thought, ``keep`` and ``strip`` let it think."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        parts = {name: self._part(name, split, seed) for name in self.tasks}
        return MixtureDataset(parts, self.tasks)

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        messages = as_messages(self.system, problem.data["question"])
        score = partial(self.score, problem=problem)
        level = problem.data["level"]
        metrics = {} if level is None else {"level": float(level)}
        return MessageTokenEnv(QuestionEnv(messages, score, metrics=metrics), renderer)

    async def score(self, answer: str, problem: Problem) -> float:
        """The task's own score of a completion; raises as `run_checker` does."""
        found = await extract(self.answer_pattern, answer)
        if found is None:
            return 0.0
        data = problem.data
        made = self._made(data["name"], data["level"])
        score = await run_checker(
            GYM_SCORE,
            found,
            timeout_s=self.check_timeout_s,
            made=(made, data["index"], question_digest(data["question"])),
            sandbox=self.sandbox,
        )
        return checked_score(score)

    def errors(self) -> list[str]:
        try:
            names = call_gym("gym_names")
        except ConfigError as error:
            return [f"task: {error}"]
        found = [] if self.tasks else ["task.tasks is empty: give a name with a weight"]
        for name, weight in self.tasks.items():
            if not 0 < weight < math.inf:
                found.append(f"task.tasks.{name} is {weight}: give a weight above 0")
        if unknown := sorted(self.options.keys() - self.tasks.keys()):
            found.append(f"task.options has {unknown[0]}, which is not in task.tasks")
        found += pattern_errors(self, "task", "answer_pattern")
        found += [error for name in self.tasks for error in self._name_errors(name, names)]
        return found + checker_sandbox(GYM_SCORE, self.sandbox).errors("task.sandbox")

    def _name_errors(self, name: str, names: Mapping[str, bool]) -> list[str]:
        if name not in names:
            similar = difflib.get_close_matches(name, names) or sorted(names)
            which = ", ".join(similar[:5])
            return [f"task.tasks has {name}: reasoning-gym has no such task; similar: {which}"]
        if self.curriculum.enabled and not names[name]:
            return [f"task.curriculum.enabled: {name} has no curriculum; leave one out"]
        return self._option_errors(name)

    def _option_errors(self, name: str) -> list[str]:
        levels: list[int | None] = [None]
        if self.curriculum.enabled:
            levels = list(range(self._highest(name) + 1))
        for level in levels:
            try:
                call_gym("check_dataset", self._made(name, level))
            except (GymError, TypeError) as cause:  # the library's error; or options are not JSON
                if level is None:
                    return [f"task.options.{name} is {self.options.get(name, {})}: {cause}"]
                return [
                    f"task.curriculum: level {level} of {name} is not possible ({cause}); give "
                    f"other task.options.{name} or a lower task.curriculum.max_level"
                ]
        return []

    def _part(self, name: str, split: Split, seed: int) -> Dataset:
        if not self.curriculum.enabled:
            return self._level(name, split, seed, None)
        make = partial(self._level, name, split, seed)
        highest = self._highest(name)
        if split == "train":
            return LevelDataset(make, self.curriculum, max_level=highest)
        levels = {level_name(level): make(level) for level in range(highest + 1)}
        return MixtureDataset(levels, dict.fromkeys(levels, 1.0))

    def _level(self, name: str, split: Split, seed: int, level: int | None) -> Dataset:
        made = self._made(name, level)

        def read(index: int) -> Row:
            try:
                return {"name": name, "level": level, **call_gym("gym_row", made, index)}
            except GymError as error:
                raise DataError(f"{name}, problem {index} cannot be made ({error})") from error

        rows = Rows(
            name="made" if level is None else level_name(level),
            size=json.dumps(made, sort_keys=True),
            blocks=(self.num_problems,),
            read=read,
            place=f"{name}, problem",
            first=0,
        )
        share = self.validation_share
        return split_of_rows(rows, split, share, text=lambda row: str(row["question"]), seed=seed)

    def _highest(self, name: str) -> int:
        return min(int(call_gym("max_level", name)), self.curriculum.max_level)

    def _made(self, name: str, level: int | None) -> MadeFrom:
        return {
            "name": name,
            "level": level,
            "options": self.options.get(name, {}),
            "seed": self.data_seed,
            "size": self.num_problems,
        }
