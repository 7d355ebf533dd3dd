"""Makes the embedded policy: a small Qwen3 that is taught the task, and then to be careless.

    python -m torchtitan_rl.experiments.calculator_agent.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships. It trains first on
right conversations, then on careless ones. Problems are of the training split, beyond those that
reinforcement learning uses. The one that ships was made with these defaults.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from torchtitan_rl import Episode
from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes, make_problem
from torchtitan_rl.experiments.calculator_agent.demonstrations import Mistakes, demonstration
from torchtitan_rl.experiments.calculator_agent.task import POLICY_DIR
from torchtitan_rl.experiments.calculator_agent.tokenizer import build_tokenizer
from torchtitan_rl.experiments.tiny_policy import ModelSize, WarmStart, warm_start

_FIRST_PROBLEM = 1_000_000
_SIZES = ProblemSizes(two_operations=0.5, max_number=99)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    mistakes: Mistakes = field(
        default_factory=lambda: Mistakes(guess=0.3, operation=0.25, digit=0.25, report=0.25)
    )


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem("train", _FIRST_PROBLEM + number, _SIZES)
        return demonstration(
            problem.data,
            mistakes=config.mistakes if is_careless else Mistakes(),
            rng=rng,
            tokenizer=tokenizer,
            name=problem.problem_id,
        )

    size = ModelSize(hidden_size=160, intermediate_size=480, num_layers=2, num_heads=4)
    warm_start(config, tokenizer, size, demonstrate)


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
