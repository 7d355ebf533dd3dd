"""Questions for a code interpreter as a `Task`; its fields are command-line options."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_rl import (
    Dataset,
    MessageTokenEnv,
    Problem,
    PythonTools,
    RendererKind,
    RolloutConfig,
    SandboxConfig,
    Split,
    Task,
    Thinking,
    TokenEnv,
    ToolEnv,
    make_renderer,
)
from torchtitan_rl.experiments.code_interpreter.dataset import make_problem
from torchtitan_rl.experiments.procedural import MAX_PROBLEMS, ProceduralDataset

POLICY_DIR = Path(__file__).parent / "policy"  # the embedded policy, in Hugging Face format
_LEAST_NUMBER, _MOST_NUMBER = 20, 9999


@dataclass(frozen=True, kw_only=True)
class CodeInterpreterTask(Task):
    """Answer questions about numbers by running Python programs: any number of calls, then the
    answer. The reward is 1 if the last number of that is right."""

    max_number: int = 99
    """Largest number in a question."""
    shows_tools: bool = False
    """Whether the prompt describes the tool; the embedded policy knows it."""
    traceback: bool = False
    """Whether a failed program is answered with its traceback, or only with the last line."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Where the programs run."""
    num_train_problems: int = 4096
    """Problems of one epoch."""
    num_validation_problems: int = 512
    """Problems of the validation set."""
    renderer: RendererKind = "auto"
    """How messages become tokens; ``auto`` goes by the model."""
    thinking: Thinking = "off"
    """Of Qwen3: ``off`` prefills an empty thought, ``keep`` and ``strip`` let it think."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        train = split == "train"
        return ProceduralDataset(
            split,
            seed=seed,
            num_problems=self.num_train_problems if train else self.num_validation_problems,
            make=partial(make_problem, max_number=self.max_number),
        )

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        env = ToolEnv(
            [{"role": "user", "content": problem.data["question"]}],
            PythonTools(self.sandbox, traceback=self.traceback),
            partial(score, right=problem.data["answer"]),
            replays=True,
            shows_tools=self.shows_tools,
        )
        return MessageTokenEnv(env, renderer)

    def errors(self) -> list[str]:
        found = self.sandbox.errors("task.sandbox")
        if not _LEAST_NUMBER <= self.max_number <= _MOST_NUMBER:
            found.append(
                f"task.max_number={self.max_number}: must be {_LEAST_NUMBER} to {_MOST_NUMBER}"
            )
        for name in ("num_train_problems", "num_validation_problems"):
            if not 1 <= getattr(self, name) <= MAX_PROBLEMS:
                found.append(f"task.{name}={getattr(self, name)}: must be 1 to {MAX_PROBLEMS}")
        return found


async def score(answer: str, right: str) -> float:
    """1 if the last number of ``answer`` is ``right``."""
    return float(re.findall(r"\d+", answer)[-1:] == [right])
