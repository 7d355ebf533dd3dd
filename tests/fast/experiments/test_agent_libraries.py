"""The task of all agent libraries, without the libraries."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.configs.agent_libraries_tiny import config
from torchtitan_rl.experiments.agent_libraries.exercise import Exercise, make_problem
from torchtitan_rl.experiments.agent_libraries.task import SIZES
from torchtitan_rl.experiments.agent_libraries.warm_start import (
    MESSAGE_FORM,
    STRUCTURED_FORM,
    build_tokenizer,
    conversation,
)
from torchtitan_rl.experiments.calculator_agent.calculator import calculate
from torchtitan_rl.experiments.calculator_agent.warm_start import Mistakes, imitated

EXERCISE = {"text": "Some and 3?", "expression": "4+3", "answer": 7, "missing": 4}


@given(st.integers(0, 1 << 24), st.sampled_from(["train", "validation"]))
def test_a_problem_lacks_one_number_and_with_it_has_the_answer(index: int, split: Any) -> None:
    data = make_problem(split, index, SIZES).data
    said = [int(number) for number in re.findall(r"\d+", data["text"])]
    used = [int(number) for number in re.findall(r"\d+", data["expression"])]
    assert sorted([*said, data["missing"]]) == sorted(used)
    assert len(re.findall(r"\bsome\b", data["text"], re.IGNORECASE)) == 1
    assert not data["text"][0].islower()
    assert calculate(data["expression"]) == data["answer"]


def test_the_user_answers_one_question_and_takes_anything_else_as_the_answer() -> None:
    exercise = Exercise(problem=EXERCISE)
    assert exercise.reply("The answer is 7.") is None
    assert exercise.reply("How many?") == "It is 4."
    assert exercise.reply("How many?") is None


@pytest.mark.parametrize(
    ("expression", "answer", "reward"),
    [
        ("4+3", "The answer is 7.", 1.0),
        ("4+3", "7", 1.0),
        ("4+3", "The answer is 8.", 0.3),
        ("4+4", "The answer is 8.", 0.1),
        ("4+", "The answer is 8.", 0.0),
        ("4+3", None, 0.3),
    ],
)
def test_the_last_message_is_scored(expression: str, answer: str | None, reward: float) -> None:
    exercise = Exercise(problem=EXERCISE)
    exercise.calculator(expression)
    result = exercise.result(answer, library="openai")
    assert result.reward == result.metrics["reward/openai"] == reward
    assert result.metrics["right_answers"] == (reward == 1.0)
    assert result.metrics["gave_up"] == (answer is None)


@pytest.mark.parametrize("arguments", [None, [], {}, {"expression": 3}, {"x": "3"}, "3"])
def test_arguments_that_are_no_expression_are_an_error_for_the_policy(arguments: Any) -> None:
    assert Exercise(problem=EXERCISE).checked_calculator(arguments).startswith("error: ")


FORMS = pytest.mark.parametrize("tools", [MESSAGE_FORM, STRUCTURED_FORM])


@FORMS
def test_demonstrations_are_one_episode_each_and_fit_into_the_ready_run(tools: Any) -> None:
    """`imitated` refuses a conversation whose prompts do not extend each other."""
    mistakes = Mistakes(guess=0.3, operation=0.3, digit=0.3, report=0.3)
    rng, tokenizer = random.Random(0), build_tokenizer()
    for index in range(100):
        problem = make_problem("train", index, SIZES)
        messages = conversation(problem.data, mistakes, tools=tools, rng=rng)
        episode = imitated(messages, tools=tools, tokenizer=tokenizer, name="x")
        assert len(episode.token_ids) < config.rollout.max_total_tokens / 1.5
