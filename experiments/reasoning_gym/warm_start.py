"""Makes the embedded policy of reasoning-gym: a small Qwen3, trained on demonstrations.

    python -m torchtitan_rl.experiments.reasoning_gym.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16). By default it replaces the policy in this package, which
was made with these defaults. Training uses right answers first, then careless ones (see
`experiments.tiny_policy`). Questions of the validation set are left out.

Each word of the questions, each digit and each letter is a token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from tokenizers import Tokenizer

from torchtitan_rl import Episode, make_renderer
from torchtitan_rl.experiments.reasoning_gym.task import POLICY_DIR, TASK
from torchtitan_rl.experiments.tiny_policy import (
    CHATML,
    ModelSize,
    WarmStart,
    build_word_backend,
    demonstration,
    warm_start,
    with_chat_template,
)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    decay_steps: int = 300
    demonstrations_per_step: int = 64
    carelessness: float = 0.35  # probability of a wrong sum, and that two letters change places


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
    """Return an answer with mistakes: a sum may be wrong by 1 to 3; letters of a word may change
    places."""
    if answer.lstrip("-").isdigit():
        wrong = rng.random() < chance
        return str(int(answer) + wrong * rng.choice((-3, -2, -1, 1, 2, 3)))
    letters = list(answer)
    for place in range(len(letters) - 1):
        if rng.random() < chance / 2:
            letters[place], letters[place + 1] = letters[place + 1], letters[place]
    return "".join(letters)


# Line breaks; a word or a run of signs, each with the space before it; a digit; other white space.
# A word that is not in a question falls apart into its letters.
_PIECE = r"\n+| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s"

_QUESTIONS = (
    "State the final answer to the following arithmetic problem: 0123456789 + 1 - 1 =\n"
    "Spell this word backward (example: sun -> nus): "
)


def build_tokenizer() -> Any:
    """Build the `transformers` tokenizer of the policy; the result is always the same."""
    return with_chat_template(build_backend(), CHATML)


def build_backend() -> Tokenizer:
    return build_word_backend(f"system\nuser\nassistant\n{_QUESTIONS}", piece=_PIECE)


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
