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
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from torchtitan_rl import Episode, make_renderer
from torchtitan_rl.experiments.alphabet_sort.dataset import ProblemSizes, make_problem
from torchtitan_rl.experiments.alphabet_sort.demonstrations import Mistakes, demonstration
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.experiments.alphabet_sort.tokenizer import build_tokenizer
from torchtitan_rl.experiments.tiny_policy import ModelSize, WarmStart, warm_start

_FIRST_PROBLEM = 1_000_000
_SIZES = ProblemSizes(min_turns=2, max_turns=3, min_names=2, max_names=3)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    threads: int = 2
    mistakes: Mistakes = field(default_factory=lambda: Mistakes(omit=0.1, mark=0.35, swap=0.35))


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem("train", _FIRST_PROBLEM + number, _SIZES)
        return demonstration(
            problem.data["turns"],
            mistakes=config.mistakes if is_careless else Mistakes(),
            rng=rng,
            renderer=renderer,
            tokenizer=tokenizer,
            name=problem.problem_id,
        )

    size = ModelSize(hidden_size=192, intermediate_size=640, num_layers=2, num_heads=4)
    warm_start(config, tokenizer, size, demonstrate)


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
