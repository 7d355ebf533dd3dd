"""Makes the embedded policy: a small Qwen3 that is taught the task, and then to be careless.

    python -m torchtitan_rl.experiments.code_interpreter.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships, which was made with
these defaults. Problems are of the training split, beyond those that reinforcement learning uses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from torchtitan_rl import Episode, make_renderer
from torchtitan_rl.experiments.code_interpreter.conversations import Mistakes, conversation
from torchtitan_rl.experiments.code_interpreter.dataset import make_problem
from torchtitan_rl.experiments.code_interpreter.task import POLICY_DIR
from torchtitan_rl.experiments.code_interpreter.tokenizer import build_tokenizer
from torchtitan_rl.experiments.tiny_policy import ModelSize, WarmStart, demonstration, warm_start

_FIRST_PROBLEM = 1_000_000


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    right_steps: int = 200
    careless_steps: int = 100
    decay_steps: int = 150
    row_len: int = 320
    mistakes: Mistakes = field(
        default_factory=lambda: Mistakes(guess=0.3, edge=0.4, digit=0.2, name=0.35, report=0.2)
    )


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem("train", _FIRST_PROBLEM + number, max_number=99)
        mistakes = config.mistakes if is_careless else Mistakes()
        return demonstration(
            problem.problem_id,
            conversation(problem.data, mistakes, rng),
            renderer=renderer,
            tokenizer=tokenizer,
        )

    size = ModelSize(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, head_dim=32)
    warm_start(config, tokenizer, size, demonstrate)


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
