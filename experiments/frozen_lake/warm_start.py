"""Makes the embedded policy: a small Qwen3 that is taught the way, and then to be careless.

    python -m torchtitan_rl.experiments.frozen_lake.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships, which was made with
these defaults. It trains with the project's own trainer, on maps that reinforcement learning does
not use.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from torchtitan_rl import Episode, make_renderer
from torchtitan_rl.experiments.frozen_lake.task import POLICY_DIR, TASK
from torchtitan_rl.experiments.frozen_lake.tokenizer import build_tokenizer
from torchtitan_rl.experiments.frozen_lake.walks import walk
from torchtitan_rl.experiments.tiny_policy import ModelSize, WarmStart, demonstration, warm_start

_FIRST_SEED = 1_000_000
_LESSONS = replace(TASK, kwargs={**TASK.kwargs, "max_episode_steps": 8})  # which fit into a row


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    right_steps: int = 250  # on shortest ways
    careless_steps: int = 50  # on ways with moves at random
    decay_steps: int = 100
    demonstrations_per_step: int = 24
    carelessness: float = 0.3  # chance of a move to be any of the four


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="chatml")

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        seed = _FIRST_SEED + number
        carelessness = config.carelessness if is_careless else 0.05
        moves = walk(_LESSONS, seed, carelessness=carelessness, rng=rng)
        turns = [([{"role": "user", "content": seen}], answer) for seen, answer in moves]
        return demonstration(str(seed), turns, renderer=renderer, tokenizer=tokenizer)

    size = ModelSize(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, head_dim=32)
    warm_start(config, tokenizer, size, demonstrate)


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
