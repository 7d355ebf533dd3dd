"""Pictures show what is asked, and a policy can answer in one word."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from torchtitan_rl.experiments.pictures.task import (
    COLOURS,
    PictureEnv,
    PicturesTask,
    make_problem,
    picture,
)
from torchtitan_rl.experiments.pictures.warm_start import build_tokenizer


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_picture_shows_the_colour_that_is_right(split: Any) -> None:
    dataset = PicturesTask().dataset(split, seed=0)
    problems = [dataset.next() for _ in range(40)]
    assert {one.data["colour"] for one in problems} == set(COLOURS)
    for problem in problems:
        pixels = np.asarray(picture(problem), dtype=float)
        quarters = pixels.reshape(2, 28, 2, 28, 3).mean((1, 3)).reshape(4, 3)
        shown = quarters[np.abs(quarters - 128).sum(1).argmax()]
        nearest = min(COLOURS, key=lambda name: np.abs(shown - COLOURS[name]).sum())
        assert nearest == problem.data["colour"]


def test_pictures_of_two_splits_differ() -> None:
    one, other = (np.asarray(picture(make_problem(split, 0))) for split in ("train", "validation"))
    assert (one != other).any()


def test_the_right_word_alone_has_a_reward() -> None:
    env = PictureEnv(make_problem("train", 0))
    right = make_problem("train", 0).data["colour"]
    for said, reward in {right: 1.0, f" {right}\n": 1.0, "": 0.0, " ".join(COLOURS): 0.0}.items():
        assert asyncio.run(env.step({"content": said})).reward == reward


def test_each_colour_is_one_token() -> None:
    tokenizer = build_tokenizer()
    assert all(len(tokenizer.encode(name)) == 1 for name in COLOURS)
