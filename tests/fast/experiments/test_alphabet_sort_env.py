from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from torchtitan_rl.experiments.alphabet_sort.env import AlphabetSortEnv
from torchtitan_rl.experiments.alphabet_sort.scoring import right_answer
from torchtitan_rl.experiments.alphabet_sort.task import AlphabetSortTask
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


def test_each_turn_shows_only_its_own_names_and_the_first_one_the_rules() -> None:
    answers = [right_answer(TURNS, turn) for turn in range(2)]
    seen = asyncio.run(play(AlphabetSortEnv(TURNS, power=2), answers))
    texts = [observation.messages[0]["content"] for observation in seen]  # type: ignore[union-attr]
    assert texts[0].endswith("\nZoe\nAdam")
    assert "// new" in texts[0]
    assert texts[1:] == ["More names:\nKate\nBen", "More names:\nCarl"]


def test_the_reward_is_the_mean_of_the_turns_scores() -> None:
    answers = [right_answer(TURNS, 0), [], ["Adam", "Ben", "Carl", "Kate", "Zoe"]]
    _, first, second, end = asyncio.run(play(AlphabetSortEnv(TURNS, power=1), answers))
    assert (first.turn_reward, second.turn_reward, end.turn_reward) == (1.0, 0.0, 0.8)
    assert isinstance(end, Terminal)
    assert end.reward == pytest.approx(1.8 / 3)


def test_turns_after_a_limit_count_zero() -> None:
    async def cut_after_one_turn() -> Terminal:
        env = AlphabetSortEnv(TURNS, power=2)
        await play(env, [right_answer(TURNS, 0)])
        return await env.finish(RolloutStatus.MAX_TOKENS)

    end = asyncio.run(cut_after_one_turn())
    assert end.reward == pytest.approx(1 / 3)
    assert end.status is RolloutStatus.MAX_TOKENS


def test_an_assistant_message_without_content_scores_zero() -> None:
    async def silent() -> MessageObservation | Terminal:
        env = AlphabetSortEnv(TURNS, power=2)
        await env.reset()
        return await env.step({"role": "assistant", "content": None})

    assert asyncio.run(silent()).turn_reward == 0.0


def test_the_default_task_has_no_errors() -> None:
    assert AlphabetSortTask().errors() == []


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


def test_validation_problems_differ_from_training_problems() -> None:
    task = AlphabetSortTask()
    first = {split: task.dataset(split, seed=0).next() for split in ("train", "validation")}  # type: ignore[arg-type]
    assert first["train"].data != first["validation"].data
