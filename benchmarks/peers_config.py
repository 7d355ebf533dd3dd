"""Our side of `benchmarks.peers`: a configuration for `torchtitan-rl train`, and its task.

Options on the command line choose the workload (``--task.prompt-tokens 16``). Loss and advantages
are TRL's defaults: ratios are clipped at 0.2 on both sides, the loss is the mean over tokens, and
advantages are divided by the group's standard deviation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from benchmarks.peers_work import Workload, even_share
from torchtitan_rl import (
    Completion,
    Dataset,
    EvaluationConfig,
    GeneratorConfig,
    LossConfig,
    Observation,
    OptimizerConfig,
    PolicyConfig,
    Problem,
    RolloutConfig,
    RolloutStatus,
    RunConfig,
    Split,
    Task,
    Terminal,
    TokenEnv,
    TrainerConfig,
)


class Prompts:
    """Problems "0", "1", ... without end, in one epoch."""

    epoch = 0

    def __init__(self) -> None:
        self._position = 0

    def next(self) -> Problem:
        index = self._position
        self._position += 1
        return Problem(problem_id=str(index), data={})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


class OneAnswer:
    """An environment with one turn of at most ``max_tokens``."""

    def __init__(self, prompt_token_ids: tuple[int, ...], max_tokens: int) -> None:
        self._observation = Observation(prompt_token_ids=prompt_token_ids, max_tokens=max_tokens)

    async def reset(self) -> Observation:
        return self._observation

    async def step(self, completion: Completion) -> Terminal:
        return Terminal(reward=even_share(completion.token_ids))

    async def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=0.0)

    async def close(self) -> None: ...


_MADE: Counter[str] = Counter()  # number of environments made for each problem


@dataclass(frozen=True, kw_only=True)
class PeersTask(Task):
    """A `Workload` as a task with one answer for each rollout. Each sibling of a group gets another
    one of the group's lengths."""

    prompt_tokens: int = 205
    """Length of each prompt."""
    max_tokens: int = 64
    """Longest answer whose end is sampled."""
    median: int = 0
    """Median of fixed lengths; 0 samples the ends."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        return Prompts()

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        workload = Workload(
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            median=self.median,
            groups=limits.groups_per_step,
            group_size=limits.group_size,
        )
        index = int(problem.problem_id)
        prompt = tuple(tokenizer(workload.prompt(index))["input_ids"])
        if not self.median:
            return OneAnswer(prompt, self.max_tokens)
        sibling = _MADE[problem.problem_id]
        _MADE[problem.problem_id] += 1
        return OneAnswer(prompt, workload.group_lengths(index)[sibling % limits.group_size])


config = RunConfig(
    name="peers",
    policy=PolicyConfig(checkpoint="set by benchmarks.peers"),
    task=PeersTask(),
    rollout=RolloutConfig(max_turns=1, advantage="std"),
    generator=GeneratorConfig(replicas=2, max_running_requests=64),
    trainer=TrainerConfig(
        threads=2,
        loss=LossConfig(clip_low=0.2, clip_high=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-6),
    ),
    evaluation=EvaluationConfig(num_problems=0),
)
