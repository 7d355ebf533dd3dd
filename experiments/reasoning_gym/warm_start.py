"""Makes the embedded policy: a small Qwen3 that is taught the tasks, and then to be careless.

    python -m torchtitan_rl.experiments.reasoning_gym.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships, which was made with
these defaults. It trains with the project's own trainer, first on right answers, then on careless
ones. Questions of the validation set are left out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from torchtitan_rl import Episode, make_renderer
from torchtitan_rl.experiments.reasoning_gym.task import POLICY_DIR, TASK
from torchtitan_rl.experiments.reasoning_gym.tokenizer import build_tokenizer
from torchtitan_rl.experiments.tiny_policy import (
    ModelSize,
    WarmStart,
    demonstration,
    warm_start,
)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    decay_steps: int = 300
    demonstrations_per_step: int = 64
    carelessness: float = 0.35  # chance of a wrong sum, and of two letters to change places


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="chatml")
    options = {**TASK.options, "chain_sum": {"min_terms": 2, "max_terms": 3, "max_digits": 1}}
    lessons = replace(TASK, options=options, num_problems=1_000_000)
    problems = lessons.dataset("train", seed=config.seed)

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = problems.next()
        answer = careless(problem.data["answer"], config.carelessness * is_careless, rng)
        question = {"role": "user", "content": problem.data["question"]}
        return demonstration(
            problem.problem_id, [([question], answer)], renderer=renderer, tokenizer=tokenizer
        )

    size = ModelSize(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, head_dim=32)
    warm_start(config, tokenizer, size, demonstrate)


def careless(answer: str, chance: float, rng: random.Random) -> str:
    """A sum that may be wrong by 1 to 3, or a word whose letters may change places."""
    if answer.lstrip("-").isdigit():
        wrong = rng.random() < chance
        return str(int(answer) + wrong * rng.choice((-3, -2, -1, 1, 2, 3)))
    letters = list(answer)
    for place in range(len(letters) - 1):
        if rng.random() < chance / 2:
            letters[place], letters[place + 1] = letters[place + 1], letters[place]
    return "".join(letters)


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
