"""Our side of `benchmarks.peers`: a configuration for `torchtitan-rl train`, and its task.

Options on the command line choose the workload (``--task.workload.prompt-tokens 16``). Loss and
advantages are those of TRL's defaults: clipped at 0.2 on both sides, mean over tokens, rewards
divided by the group's standard deviation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
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

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._position = 0

    def next(self) -> Problem:
        index = self._position
        self._position += 1
        return Problem(problem_id=str(index), data={"prompt": self._workload.prompt(index)})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


class OneAnswer:
    """One turn of at most ``max_tokens``."""

    def __init__(self, prompt_token_ids: tuple[int, ...], max_tokens: int) -> None:
        self._observation = Observation(prompt_token_ids=prompt_token_ids, max_tokens=max_tokens)

    async def reset(self) -> Observation:
        return self._observation

    async def step(self, completion: Completion) -> Terminal:
        return Terminal(reward=even_share(completion.token_ids))

    async def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=0.0)

    async def close(self) -> None: ...


_MADE: Counter[str] = Counter()  # environments of each problem


@dataclass(frozen=True, kw_only=True)
class PeersTask(Task):
    """The workload as single answers. Each sibling of a group gets another of its lengths."""

    workload: Workload = field(default_factory=Workload)

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        return Prompts(self.workload)

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        prompt = tuple(tokenizer(problem.data["prompt"])["input_ids"])
        max_tokens = self.workload.max_tokens
        if self.workload.median:
            lengths = self.workload.group_lengths(int(problem.problem_id))
            max_tokens = lengths[_MADE[problem.problem_id] % len(lengths)]
            _MADE[problem.problem_id] += 1
        return OneAnswer(prompt, max_tokens)


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
