"""Makes the embedded policy: a small Qwen3 that is taught the task, and then to be careless.

    python -m torchtitan_rl.experiments.alphabet_sort.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships. It trains with the
project's own trainer, first on right answers, then on answers with mistakes. Problems are of the
training split, beyond those that reinforcement learning uses. The one that ships was made with
``--threads 1``.
Everything is seeded; on another machine or number of threads rounding may differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from torchtitan_rl import Episode, OptimizerConfig, make_renderer
from torchtitan_rl.experiments.alphabet_sort.dataset import ProblemSizes, make_problem
from torchtitan_rl.experiments.alphabet_sort.demonstrations import Mistakes, demonstration
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.experiments.alphabet_sort.tokenizer import build_tokenizer
from torchtitan_rl.experiments.tiny_policy import ModelSize, teach

_FIRST_PROBLEM = 1_000_000


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    output_dir: Path = POLICY_DIR
    seed: int = 0
    right_steps: int = 700  # on right answers
    careless_steps: int = 150  # on answers with mistakes
    decay_steps: int = 350  # the last steps, in which the learning rate falls to 0
    conversations_per_step: int = 32
    learning_rate: float = 3e-3
    threads: int = 2
    mistakes: Mistakes = field(default_factory=lambda: Mistakes(omit=0.1, mark=0.35, swap=0.35))


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    teach(
        config.output_dir,
        tokenizer,
        ModelSize(hidden_size=192, intermediate_size=640, num_layers=2, num_heads=4),
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
    sizes = ProblemSizes(min_turns=2, max_turns=3, min_names=2, max_names=3)
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")
    rng = random.Random(config.seed)
    index = _FIRST_PROBLEM
    for step in range(config.right_steps + config.careless_steps):
        mistakes = Mistakes() if step < config.right_steps else config.mistakes
        episodes = []
        for _ in range(config.conversations_per_step):
            problem = make_problem("train", index, sizes)
            index += 1
            episodes.append(
                demonstration(
                    problem.data["turns"],
                    mistakes=mistakes,
                    rng=rng,
                    renderer=renderer,
                    tokenizer=tokenizer,
                    name=problem.problem_id,
                )
            )
        yield episodes


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
