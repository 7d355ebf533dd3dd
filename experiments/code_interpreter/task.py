"""Questions for a code interpreter as a `Task`. Its fields are command-line options.

The questions are about numbers, and too hard without a computer. Invariants: those of
`experiments.procedural`. The expression that answers a question decides its split, so no question
is in both splits.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from torchtitan_rl.experiments.procedural import ProceduralDataset, size_errors, split_of

POLICY_DIR = Path(__file__).parent / "policy"  # the embedded policy, in Hugging Face format
_LEAST_NUMBER, _MOST_NUMBER = 20, 9999


@dataclass(frozen=True, kw_only=True)
class CodeInterpreterTask(Task):
    """Answer questions about numbers by running Python programs. The policy may run any number of
    programs before it answers. The reward is 1 if the last number of the answer is right."""

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
    """How messages become tokens; ``auto`` chooses the renderer that fits the model."""
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
        return [*found, *size_errors(self)]


async def score(answer: str, right: str) -> float:
    """1 if the last number of ``answer`` is ``right``."""
    return float(re.findall(r"\d+", answer)[-1:] == [right])


class Kind(NamedTuple):
    """A kind of question, as templates. ``a`` is below ``b``; ``c`` is from 2 to 9."""

    question: str
    expression: str


KINDS: tuple[Kind, ...] = (
    Kind(
        "How many numbers from {a} to {b} are divisible by {c}?",
        "sum(n%{c}==0 for n in range({a},{b}+1))",
    ),
    Kind(
        "What is the sum of the numbers from {a} to {b} that are divisible by {c}?",
        "sum(n for n in range({a},{b}+1) if n%{c}==0)",
    ),
    Kind(
        "How many prime numbers are there from {a} to {b}?",
        "sum(all(n%d for d in range(2,n)) for n in range({a},{b}+1))",
    ),
    Kind(
        "What is the sum of the digits of {a} to the power of {c}?",
        "sum(int(d) for d in str({a}**{c}))",
    ),
    Kind("What is the largest digit of {a} times {b}?", "max(str({a}*{b}))"),
    Kind("What is the remainder of {a} to the power of {b} by {c}?", "{a}**{b}%{c}"),
)


def make_problem(split: Split, index: int, max_number: int) -> Problem:
    """Make problem ``index``; its ``data`` has ``question``, ``expression`` and ``answer``."""
    rng = random.Random(f"code_interpreter/{split}/{index}")
    kind = rng.choice(KINDS)
    while True:
        a, b = sorted(rng.sample(range(10, max_number + 1), 2))
        numbers = {"a": a, "b": b, "c": rng.randint(2, 9)}
        expression = kind.expression.format(**numbers)
        if split_of(expression) == split:
            break
    return Problem(
        problem_id=f"code_interpreter/{split}/{index}",
        data={
            "question": kind.question.format(**numbers),
            "expression": expression,
            "answer": str(eval(expression)),  # an expression of `KINDS`, with numbers
        },
    )
