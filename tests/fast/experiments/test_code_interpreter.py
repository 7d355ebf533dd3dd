"""Questions for a code interpreter: right answers and careless ones."""

from __future__ import annotations

import random

import pytest

from tests.support.async_tests import on_event_loop
from torchtitan_rl import PythonTools, SandboxConfig, make_renderer
from torchtitan_rl.configs.code_interpreter_tiny import config as CONFIG
from torchtitan_rl.experiments.code_interpreter.task import KINDS, make_problem, score
from torchtitan_rl.experiments.code_interpreter.warm_start import (
    Mistakes,
    WarmStartConfig,
    build_tokenizer,
    conversation,
    result_of,
    with_mistakes,
)
from torchtitan_rl.experiments.tiny_policy import demonstration

LIMITED = SandboxConfig(isolation="limits")


PROBLEMS = [make_problem("train", index, max_number=99) for index in range(60)]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("How many numbers from 10 to 20 are divisible by 5?", "3"),
        ("What is the sum of the numbers from 10 to 20 that are divisible by 5?", "45"),
        ("How many prime numbers are there from 10 to 20?", "4"),
        ("What is the sum of the digits of 10 to the power of 5?", "1"),
        ("What is the largest digit of 10 times 20?", "2"),
        ("What is the remainder of 10 to the power of 20 by 5?", "0"),
    ],
)
def test_the_expression_of_a_kind_answers_its_question(question, answer) -> None:
    numbers = {"a": 10, "b": 20, "c": 5}
    (kind,) = (kind for kind in KINDS if kind.question.format(**numbers) == question)
    assert result_of(kind.expression.format(**numbers)) == answer


@on_event_loop
async def test_demonstrations_show_what_the_tool_answers() -> None:
    tools, rng = PythonTools(LIMITED, traceback=False), random.Random(0)
    for problem in PROBLEMS:
        expression = with_mistakes(
            problem.data["expression"], Mistakes(edge=0.5, digit=0.5, name=0.5), rng
        )
        answer = await tools.call("python", {"code": f"print({expression})"})
        assert answer.text == result_of(expression)


@on_event_loop
async def test_careless_demonstrations_fit_into_the_budgets_and_are_often_wrong() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(0)
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")
    right, num_calls = 0.0, []
    for problem in PROBLEMS:
        turns = conversation(problem.data, WarmStartConfig().mistakes, rng)
        episode = demonstration("d", turns, renderer=renderer, tokenizer=tokenizer)
        assert len(episode.token_ids) <= CONFIG.rollout.max_total_tokens
        assert len(turns) <= CONFIG.rollout.max_turns
        right += await score(turns[-1][1], problem.data["answer"])
        num_calls.append(len(turns) - 1)
    assert 0.2 < right / len(PROBLEMS) < 0.6
    assert {0, 1, 2} <= set(num_calls)
