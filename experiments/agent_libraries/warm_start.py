"""Makes the embedded policy: a small Qwen3 that is taught the task, and then to be careless.

    python -m torchtitan_rl.experiments.agent_libraries.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships. It trains first on
right conversations, then on careless ones, half of each in either form. Problems are of the
training split, beyond those that reinforcement learning uses. The one that ships was made with
these defaults.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from torchtitan_rl import Episode, OptimizerConfig
from torchtitan_rl.experiments.agent_libraries.dataset import make_problem
from torchtitan_rl.experiments.agent_libraries.demonstrations import (
    MESSAGE_FORM,
    STRUCTURED_FORM,
    conversation,
)
from torchtitan_rl.experiments.agent_libraries.task import POLICY_DIR, SIZES
from torchtitan_rl.experiments.agent_libraries.tokenizer import build_tokenizer
from torchtitan_rl.experiments.calculator_agent.demonstrations import Mistakes, imitated
from torchtitan_rl.experiments.tiny_policy import ModelSize, teach

_FIRST_PROBLEM = 1_000_000


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    output_dir: Path = POLICY_DIR
    seed: int = 0
    right_steps: int = 800  # on right conversations
    careless_steps: int = 150  # on those with mistakes
    decay_steps: int = 350  # the last steps, in which the learning rate falls to 0
    conversations_per_step: int = 32
    learning_rate: float = 3e-3
    threads: int = 1
    mistakes: Mistakes = field(
        default_factory=lambda: Mistakes(guess=0.35, operation=0.2, digit=0.2, report=0.2)
    )


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    teach(
        config.output_dir,
        tokenizer,
        ModelSize(
            hidden_size=160,
            intermediate_size=480,
            num_layers=2,
            num_heads=4,
            max_positions=4096,  # some libraries write much that is not in the vocabulary
        ),
        _lessons(config, tokenizer),
        num_steps=config.right_steps + config.careless_steps,
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate, warmup_steps=50, decay_steps=config.decay_steps
        ),
        threads=config.threads,
        seed=config.seed,
    )


def _lessons(config: WarmStartConfig, tokenizer: Any) -> Iterator[list[Episode]]:
    """The conversations of each step."""
    rng = random.Random(config.seed)
    index = _FIRST_PROBLEM
    for step in range(config.right_steps + config.careless_steps):
        mistakes = Mistakes() if step < config.right_steps else config.mistakes
        episodes = []
        for _ in range(config.conversations_per_step):
            problem = make_problem("train", index, SIZES)
            tools = (MESSAGE_FORM, STRUCTURED_FORM)[index % 2]
            messages = conversation(problem.data, mistakes, tools=tools, rng=rng)
            episodes.append(
                imitated(messages, tools=tools, tokenizer=tokenizer, name=problem.problem_id)
            )
            index += 1
        yield episodes


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
