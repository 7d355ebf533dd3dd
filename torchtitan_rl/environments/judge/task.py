"""Any task, with an LLM judge's score as its reward or as a part of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchtitan_rl.environments.judge.config import JudgeConfig
from torchtitan_rl.environments.judge.judge import Judge
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric, Score, environment_score
from torchtitan_rl.rollout.task import Dataset, Split, Task
from torchtitan_rl.types import Problem, Rollout

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class JudgedTask(Task):
    """The reward is ``judge_weight`` times the judge's score, and ``task_weight`` times the task's
    own reward::

        JudgedTask(
            task=DataTask(train=("data/questions.jsonl",), answer="", keep=("question",)),
            judge=JudgeConfig(base_url="http://127.0.0.1:8000/v1", model="judge"),
        )

    Options of the task: ``--task.task.prompt "{text}"``; of the judge:
    ``--task.judge.requests-per-minute 600``.
    """

    task: Task
    """The task that is judged; not one of agents."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """Whom to ask, and what."""
    judge_weight: float = 1.0
    """Weight of the judge's score, which is from 0 to 1."""
    task_weight: float = 0.0
    """Weight of the task's own reward; 0 makes that a metric, ``reward/task``."""
    solved_at: float = 0.8
    """Reward from which a problem counts as solved (pass@k)."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        return self.task.dataset(split, seed=seed)

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        return self.task.environment(problem, tokenizer=tokenizer, limits=limits)

    def rubric(self) -> Rubric:
        judge, own = Judge(self.judge), self.task.rubric()

        async def own_score(rollout: Rollout, problem: Problem) -> Score:
            return environment_score(rollout) if own is None else await own.score(rollout, problem)

        return Rubric(
            [
                judge.reward_function(weight=self.judge_weight),
                RewardFunction(name="task", function=own_score, weight=self.task_weight),
            ],
            timeout_s=max(judge.timeout_s, 0.0 if own is None else own.timeout_s),
        )

    def success_reward(self) -> float:
        return self.solved_at

    def errors(self) -> list[str]:
        found = [error.replace("task", "task.task", 1) for error in self.task.errors()]
        found += self.judge.errors()
        for name in ("judge_weight", "task_weight", "solved_at"):
            if not math.isfinite(getattr(self, name)):
                found.append(f"task.{name}={getattr(self, name)}: must be finite")
        if hasattr(self.task, "agent"):
            found.append("task.task: agents cannot be judged so; give them a rubric with a Judge")
        rubric = None if found else self.task.rubric()
        if rubric is not None and rubric.scores_groups:
            found.append("task.task: its rubric scores whole groups, which cannot be combined")
        return found
