"""Sorting names: scores, episodes of the environment, what the embedded policy is taught."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from torchtitan_rl.configs import (
    alphabet_sort_tiny,
)
from torchtitan_rl.experiments.alphabet_sort.env import (
    AlphabetSortEnv,
    right_answer,
    score,
    user_message,
)
from torchtitan_rl.experiments.alphabet_sort.task import AlphabetSortTask
from torchtitan_rl.experiments.alphabet_sort.warm_start import build_backend
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.message_env import MessageObservation
from torchtitan_rl.types import RolloutStatus

TURNS = [["Zoe", "Adam"], ["Kate", "Ben"], ["Carl"]]


def assistant(lines: Sequence[str]) -> dict[str, Any]:
    return {"role": "assistant", "content": "\n".join(lines)}


async def play(
    env: AlphabetSortEnv, answers: Sequence[Sequence[str]]
) -> list[MessageObservation | Terminal]:
    """What the environment returned: from reset first, then for each answer."""
    seen: list[MessageObservation | Terminal] = [await env.reset()]
    for lines in answers:
        seen.append(await env.step(assistant(lines)))
    return seen


def test_right_answers_in_every_turn_are_worth_one() -> None:
    answers = [right_answer(TURNS, turn) for turn in range(3)]
    *observations, end = asyncio.run(play(AlphabetSortEnv(TURNS, power=2), answers))
    assert all(isinstance(observation, MessageObservation) for observation in observations)
    assert isinstance(end, Terminal)
    assert (end.reward, end.status, end.turn_reward) == (1.0, RolloutStatus.COMPLETED, 1.0)
    assert end.metrics == {"right_turns": 1.0}


def test_the_reward_is_the_mean_of_the_turns_scores() -> None:
    answers = [right_answer(TURNS, 0), [], ["Adam", "Ben", "Carl", "Kate", "Zoe"]]
    _, first, second, end = asyncio.run(play(AlphabetSortEnv(TURNS, power=1), answers))
    assert (first.turn_reward, second.turn_reward, end.turn_reward) == (1.0, 0.0, 0.8)
    assert isinstance(end, Terminal)
    assert end.reward == pytest.approx(1.8 / 3)


@pytest.mark.parametrize(
    ("task", "field"),
    [
        (AlphabetSortTask(min_turns=0), "task.min_turns=0"),
        (AlphabetSortTask(min_turns=3, max_turns=2), "task.min_turns=3, task.max_turns=2"),
        (AlphabetSortTask(min_names=5), "task.min_names=5, task.max_names=4"),
        (AlphabetSortTask(max_names=200), "task.max_names=200"),
        (AlphabetSortTask(power=0.0), "task.power=0.0"),
        (AlphabetSortTask(num_train_problems=0), "task.num_train_problems=0"),
    ],
)
def test_an_error_names_the_field_and_its_value(task: AlphabetSortTask, field: str) -> None:
    (message,) = task.errors()
    assert field in message


def test_later_turns_merge_all_names_and_mark_only_those_of_their_own_message() -> None:
    assert right_answer(TURNS, 1) == ["Adam", "Ben // new", "Kate // new", "Zoe"]
    assert right_answer(TURNS, 2) == ["Adam", "Ben", "Carl // new", "Kate", "Zoe"]


@pytest.mark.parametrize(
    "answer",
    [
        "Adam\nKate // new\nBen // new\nZoe",  # two names in the wrong order
        "Adam\nBen\nKate // new\nZoe",  # a mark is missing
        "Adam // new\nBen // new\nKate // new\nZoe",  # a mark too many
    ],
)
def test_one_error_in_four_lines_costs_a_quarter(answer: str) -> None:
    assert score(answer, TURNS, 1, power=1) == pytest.approx(0.75)


@cache
def backend() -> Tokenizer:
    return build_backend()


def encode(text: str) -> list[int]:
    return backend().encode(text).ids


def test_a_text_is_encoded_piece_by_piece_so_that_turns_can_be_appended() -> None:
    parts = ["<|im_start|>", "user\n", "Adam\nZoe", "<|im_end|>", "\n"]
    assert encode("".join(parts)) == [token for part in parts for token in encode(part)]


TINY = alphabet_sort_tiny.config


def test_right_answers_fit_into_the_budgets_of_the_default_run() -> None:
    task, rollout = TINY.task, TINY.rollout
    assert isinstance(task, AlphabetSortTask)
    turns = [["Mark"] * task.max_names for _ in range(task.max_turns)]
    encode = build_backend().encode
    total = 0
    for turn in range(task.max_turns):
        user = f"\n<|im_start|>user\n{user_message(turns, turn)}<|im_end|>\n<|im_start|>assistant\n"
        answer = len(encode("\n".join(right_answer(turns, turn))).ids) + 1
        assert answer <= rollout.sampling.max_tokens_per_turn
        total += len(encode(user).ids) + answer
    assert total <= rollout.max_total_tokens
    assert task.max_turns <= rollout.max_turns
