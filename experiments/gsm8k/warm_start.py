"""Makes the embedded policy of GSM8K: a small Qwen3, trained on demonstrations.

    python -m torchtitan_rl.experiments.gsm8k.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16). By default it replaces the policy in this package, which
was made with these defaults. Training uses right solutions first, then solutions with mistakes (see
`experiments.tiny_policy`). Its problems are not in the files.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from torchtitan_rl import Episode, make_renderer
from torchtitan_rl.experiments.calculator_agent import warm_start as calculator_agent
from torchtitan_rl.experiments.calculator_agent.dataset import make_problem
from torchtitan_rl.experiments.gsm8k.make_file import row
from torchtitan_rl.experiments.gsm8k.task import POLICY_DIR, SIZES
from torchtitan_rl.experiments.tiny_policy import ModelSize, WarmStart, demonstration, warm_start

_FIRST_PROBLEM = 1_000_000


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    demonstrations_per_step: int = 64
    carelessness: float = 0.4  # probability of a wrong result


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="chatml")

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem("train", _FIRST_PROBLEM + number, SIZES)
        data = dict(problem.data)
        if is_careless and rng.random() < config.carelessness:
            data["answer"] += rng.choice((-3, -2, -1, 1, 2, 3))
        question = {"role": "user", "content": data["text"]}
        return demonstration(
            problem.problem_id,
            [([question], row(data)["answer"])],
            renderer=renderer,
            tokenizer=tokenizer,
        )

    size = ModelSize(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, head_dim=32)
    warm_start(config, tokenizer, size, demonstrate)


def build_tokenizer() -> Any:
    """Build the `transformers` tokenizer of the policy; the result is always the same."""
    solution = row({"text": "", "expression": "1+1", "answer": 2})["answer"]
    return calculator_agent.build_tokenizer(f"\n{solution}")


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
