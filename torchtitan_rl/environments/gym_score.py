"""Scores of reasoning-gym. Imports the library with the module, so that the time limit of
`checkers.run_checker` is that of the score alone."""

from __future__ import annotations

import reasoning_gym.factory  # noqa: F401 - `gym_dataset` needs it

from torchtitan_rl.environments.gym_datasets import MadeFrom, gym_dataset


def gym_score(made: MadeFrom, index: int, question: str, answer: str) -> float | None:
    """Run in a process of its own. None for an answer that ``score_answer`` raises an error for, as
    some do if they cannot read it.

    Raises:
        ValueError: this process makes another problem than the one that was asked.
    """
    dataset = gym_dataset(made)
    entry = dataset[index]
    if entry["question"] != question:
        raise ValueError(f"{made['name']} makes problem {index} differently in each process")
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:
        return None
