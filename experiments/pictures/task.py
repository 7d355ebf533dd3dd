"""Which colour has the square? A task with made pictures, for policies that take images.

A picture has noise, and in one quarter a square of one of four colours. The policy gets the picture
and a question, and answers with the colour. One that does not look is right in a quarter of all
problems.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_rl import (
    Dataset,
    MessageObservation,
    MessageTokenEnv,
    Problem,
    RolloutConfig,
    RolloutStatus,
    Split,
    Task,
    Terminal,
    TokenEnv,
    make_renderer,
)
from torchtitan_rl.experiments.procedural import ProceduralDataset, size_errors

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 70, 220),
    "yellow": (230, 210, 50),
}
QUESTION = "which colour?"
_SIDE = 28  # pixels of a quarter, which is one token
_NOISE = 40.0  # standard deviation, of 255


@dataclass(frozen=True, kw_only=True)
class PicturesTask(Task):
    """Name the colour of a square in a picture."""

    num_train_problems: int = 4096
    """Number of problems of an epoch."""
    num_validation_problems: int = 256
    """Number of problems for evaluations."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        number = self.num_train_problems if split == "train" else self.num_validation_problems
        return ProceduralDataset(split, seed=seed, num_problems=number, make=make_problem)

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        return MessageTokenEnv(PictureEnv(problem), make_renderer(tokenizer, kind="chatml"))

    def errors(self) -> list[str]:
        return size_errors(self)


def make_problem(split: Split, index: int) -> Problem:
    rng = random.Random(f"{split}/{index}")
    data = {"colour": rng.choice(list(COLOURS)), "quarter": rng.randrange(4), "seed": index}
    return Problem(problem_id=f"{split}/{index}", data=data)


def picture(problem: Problem) -> Any:
    """Draw the problem's picture, a ``PIL.Image``."""
    from PIL import Image

    split = 0 if problem.problem_id.startswith("train") else 1
    rng = np.random.default_rng([split, problem.data["seed"]])
    pixels = rng.normal(128.0, _NOISE, (2 * _SIDE, 2 * _SIDE, 3))
    row, column = divmod(problem.data["quarter"], 2)
    square = pixels[row * _SIDE :, column * _SIDE :][:_SIDE, :_SIDE]
    square += np.subtract(COLOURS[problem.data["colour"]], 128.0)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


class PictureEnv:
    """Asks once. The reward is 1 for the right colour."""

    replays = True

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    async def reset(self) -> MessageObservation:
        parts = [
            {"type": "image", "image": picture(self._problem)},
            {"type": "text", "text": QUESTION},
        ]
        return MessageObservation(messages=[{"role": "user", "content": parts}])

    async def step(self, message: dict[str, Any]) -> Terminal:
        return Terminal(reward=float(message["content"].strip() == self._problem.data["colour"]))

    async def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=0.0)

    async def close(self) -> None: ...
