"""Makes the embedded policy: a small Qwen3 that is taught the tasks, and then to be careless.

    python -m torchtitan_rl.experiments.reasoning_gym.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships, which was made with
these defaults. It trains with the project's own trainer, first on right answers, then on careless
ones. Questions of the validation set are left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from torchtitan_rl import ChatRenderer, Episode, OptimizerConfig, Problem, make_renderer
from torchtitan_rl.experiments.reasoning_gym.task import POLICY_DIR, TASK
from torchtitan_rl.experiments.reasoning_gym.tokenizer import build_tokenizer
from torchtitan_rl.experiments.tiny_policy import ModelSize, teach


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    output_dir: Path = POLICY_DIR
    seed: int = 0
    right_steps: int = 700  # on right answers
    careless_steps: int = 150  # on answers with mistakes
    decay_steps: int = 300  # the last steps, in which the learning rate falls to 0
    questions_per_step: int = 64
    learning_rate: float = 3e-3
    threads: int = 1
    carelessness: float = 0.35  # chance of a wrong sum, and of two letters to change places


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


def _lessons(config: WarmStartConfig, tokenizer: Any) -> Iterator[list[Episode]]:
    """The demonstrations of each step."""
    renderer = make_renderer(tokenizer, kind="chatml")
    rng = random.Random(config.seed)
    options = {**TASK.options, "chain_sum": {"min_terms": 2, "max_terms": 3, "max_digits": 1}}
    lessons = replace(TASK, options=options, num_problems=1_000_000)
    problems = lessons.dataset("train", seed=config.seed)
    for step in range(config.right_steps + config.careless_steps):
        chance = 0.0 if step < config.right_steps else config.carelessness
        episodes = []
        for _ in range(config.questions_per_step):
            problem = problems.next()
            answer = careless(problem.data["answer"], chance, rng)
            episodes.append(_demonstration(problem, answer, renderer, tokenizer))
        yield episodes


def _demonstration(
    problem: Problem, answer: str, renderer: ChatRenderer, tokenizer: Any
) -> Episode:
    """With loss on the answer and its end."""
    prompt = renderer.initial_prompt([{"role": "user", "content": problem.data["question"]}])
    end = tokenizer.eos_token_id
    completion = (*tokenizer.encode(answer, add_special_tokens=False), end)
    zeros = (0.0,) * (len(prompt) + len(completion))
    mask = (False,) * len(prompt) + (True,) * len(completion)
    return Episode(
        rollout_id=problem.problem_id,
        group_id=problem.problem_id,
        token_ids=(*prompt, *completion),
        loss_mask=mask,
        logprobs=zeros,
        advantages=zeros,
        versions=tuple(0 if sampled else -1 for sampled in mask),
    )


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
