from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from torchtitan_rl.experiments.alphabet_sort.demonstrations import (
    Mistakes,
    demonstration,
    with_mistakes,
)
from torchtitan_rl.experiments.alphabet_sort.prompts import user_message
from torchtitan_rl.experiments.alphabet_sort.scoring import right_answer
from torchtitan_rl.experiments.alphabet_sort.tokenizer import build_tokenizer
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.types import Episode

TURNS = [["Zoe", "Adam"], ["Kate", "Ben"], ["Carl"]]
LINES = ["Adam", "Ben // new", "Carl", "Zoe // new"]


@cache
def tokenizer() -> Any:
    return build_tokenizer()


def demonstrate(mistakes: Mistakes) -> Episode:
    return demonstration(
        TURNS,
        mistakes=mistakes,
        rng=random.Random(0),
        renderer=make_renderer(tokenizer(), kind="qwen3", thinking="keep"),
        tokenizer=tokenizer(),
        name="p",
    )


def test_without_mistakes_the_lines_stay_as_they_are() -> None:
    assert with_mistakes(LINES, Mistakes(), rng=random.Random(0), marks=True) == LINES


@pytest.mark.parametrize(
    ("mistakes", "expected"),
    [
        (Mistakes(omit=1.0), []),
        (Mistakes(mark=1.0), ["Adam // new", "Ben", "Carl // new", "Zoe"]),
        (Mistakes(swap=1.0), ["Ben // new", "Adam", "Zoe // new", "Carl"]),
    ],
)
def test_each_kind_of_mistake_does_what_it_says(mistakes: Mistakes, expected: list[str]) -> None:
    assert with_mistakes(LINES, mistakes, rng=random.Random(0), marks=True) == expected


def test_the_first_turn_gets_no_wrong_marks() -> None:
    lines = with_mistakes(["Adam", "Zoe"], Mistakes(mark=1.0), rng=random.Random(0), marks=False)
    assert lines == ["Adam", "Zoe"]


@pytest.mark.slow
def test_a_demonstration_is_the_conversation_as_the_chat_template_writes_it() -> None:
    messages = []
    for turn in range(3):
        messages.append({"role": "user", "content": user_message(TURNS, turn)})
        answer = "\n".join(right_answer(TURNS, turn))
        messages.append({"role": "assistant", "content": answer})
    text = tokenizer().apply_chat_template(messages, tokenize=False)
    assert tokenizer().decode(demonstrate(Mistakes()).token_ids) + "\n" == text


@pytest.mark.slow
def test_only_answers_and_their_ends_are_trained_on() -> None:
    episode = demonstrate(Mistakes())
    trained = [
        token for token, mask in zip(episode.token_ids, episode.loss_mask, strict=True) if mask
    ]
    answers = ["\n".join(right_answer(TURNS, turn)) for turn in range(3)]
    assert tokenizer().decode(trained) == "".join(f"{answer}<|im_end|>" for answer in answers)
