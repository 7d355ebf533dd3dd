"""Makes the embedded policy: a small Qwen3 that is taught the task, and then to be careless.

    python -m torchtitan_rl.experiments.agent_libraries.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships. It trains first on
right conversations, then on careless ones, half of each in either form. Problems are of the
training split, beyond those that reinforcement learning uses. The one that ships was made with
these defaults.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from torchtitan_rl import Episode
from torchtitan_rl.experiments.agent_libraries.dataset import make_problem
from torchtitan_rl.experiments.agent_libraries.demonstrations import (
    MESSAGE_FORM,
    STRUCTURED_FORM,
    conversation,
)
from torchtitan_rl.experiments.agent_libraries.task import POLICY_DIR, SIZES
from torchtitan_rl.experiments.agent_libraries.tokenizer import build_tokenizer
from torchtitan_rl.experiments.calculator_agent.demonstrations import Mistakes, imitated
from torchtitan_rl.experiments.tiny_policy import ModelSize, WarmStart, warm_start

_FIRST_PROBLEM = 1_000_000


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    right_steps: int = 800
    mistakes: Mistakes = field(
        default_factory=lambda: Mistakes(guess=0.35, operation=0.2, digit=0.2, report=0.2)
    )


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem("train", _FIRST_PROBLEM + number, SIZES)
        tools = (MESSAGE_FORM, STRUCTURED_FORM)[number % 2]
        mistakes = config.mistakes if is_careless else Mistakes()
        messages = conversation(problem.data, mistakes, tools=tools, rng=rng)
        return imitated(messages, tools=tools, tokenizer=tokenizer, name=problem.problem_id)

    size = ModelSize(
        hidden_size=160,
        intermediate_size=480,
        num_layers=2,
        num_heads=4,
        max_positions=4096,  # some libraries write much that is not in the vocabulary
    )
    warm_start(config, tokenizer, size, demonstrate)


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
