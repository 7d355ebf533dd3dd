"""Makes the embedded policy: a small Qwen3 that is taught the way, and then to be careless.

    python -m torchtitan_rl.experiments.frozen_lake.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships, which was made with
these defaults. It trains with the project's own trainer, on maps that reinforcement learning does
not use.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from torchtitan_rl import Episode, OptimizerConfig, make_renderer
from torchtitan_rl.experiments.frozen_lake.task import POLICY_DIR, TASK
from torchtitan_rl.experiments.frozen_lake.tokenizer import build_tokenizer
from torchtitan_rl.experiments.frozen_lake.walks import walk
from torchtitan_rl.experiments.tiny_policy import ModelSize, conversation, teach

_FIRST_SEED = 1_000_000
_LESSONS = replace(TASK, kwargs={**TASK.kwargs, "max_episode_steps": 8})  # which fit into a row


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    output_dir: Path = POLICY_DIR
    seed: int = 0
    right_steps: int = 250  # on shortest ways
    careless_steps: int = 50  # on ways with moves at random
    decay_steps: int = 100  # the last steps, in which the learning rate falls to 0
    walks_per_step: int = 24
    learning_rate: float = 3e-3
    threads: int = 1
    carelessness: float = 0.3  # chance of a move to be any of the four


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    teach(
        config.output_dir,
        tokenizer,
        ModelSize(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, head_dim=32),
        _lessons(config, tokenizer),
        num_steps=config.right_steps + config.careless_steps,
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate, warmup_steps=50, decay_steps=config.decay_steps
        ),
        threads=config.threads,
        seed=config.seed,
    )


def _lessons(config: WarmStartConfig, tokenizer: Any) -> Iterator[list[Episode]]:
    """The walks of each step."""
    renderer = make_renderer(tokenizer, kind="chatml")
    rng = random.Random(config.seed)
    game_seed = _FIRST_SEED
    for step in range(config.right_steps + config.careless_steps):
        carelessness = 0.05 if step < config.right_steps else config.carelessness
        episodes = []
        for _ in range(config.walks_per_step):
            moves = walk(_LESSONS, game_seed, carelessness=carelessness, rng=rng)
            episodes.append(conversation(moves, renderer, tokenizer, name=f"{game_seed}"))
            game_seed += 1
        yield episodes


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
