"""The task of all agent libraries, without the libraries."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from torchtitan_rl.config.checks.machine import MachineFacts
from torchtitan_rl.config.checks.run import find_errors
from torchtitan_rl.config.hf_model import read_policy_facts
from torchtitan_rl.configs.agent_libraries_tiny import config
from torchtitan_rl.experiments.agent_libraries.dataset import make_problem
from torchtitan_rl.experiments.agent_libraries.demonstrations import (
    MESSAGE_FORM,
    STRUCTURED_FORM,
    conversation,
)
from torchtitan_rl.experiments.agent_libraries.exercise import Exercise
from torchtitan_rl.experiments.agent_libraries.libraries import PACKAGES
from torchtitan_rl.experiments.agent_libraries.task import POLICY_DIR, SIZES, AgentLibrariesTask
from torchtitan_rl.experiments.agent_libraries.tokenizer import build_tokenizer
from torchtitan_rl.experiments.calculator_agent.calculator import calculate
from torchtitan_rl.experiments.calculator_agent.demonstrations import Mistakes, imitated

LAPTOP = MachineFacts(num_cores=2, memory_bytes=16 << 30)
FORMS = pytest.mark.parametrize("tools", [MESSAGE_FORM, STRUCTURED_FORM])
EXERCISE = {"text": "Some and 3?", "expression": "4+3", "answer": 7, "missing": 4}


@cache
def tokenizer() -> Any:
    return build_tokenizer()


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


@FORMS
def test_demonstrations_are_one_episode_each_and_fit_into_the_ready_run(tools: Any) -> None:
    """`imitated` refuses a conversation whose prompts do not extend each other."""
    mistakes = Mistakes(guess=0.3, operation=0.3, digit=0.3, report=0.3)
    rng = random.Random(0)
    for index in range(200):
        problem = make_problem("train", index, SIZES)
        messages = conversation(problem.data, mistakes, tools=tools, rng=rng)
        episode = imitated(messages, tools=tools, tokenizer=tokenizer(), name="x")
        assert len(episode.token_ids) < config.rollout.max_total_tokens / 1.5


@FORMS
def test_a_demonstration_without_mistakes_has_the_full_reward(tools: Any) -> None:
    problem = make_problem("train", 0, SIZES)
    messages = conversation(problem.data, Mistakes(), tools=tools, rng=random.Random(0))
    exercise = Exercise(problem=problem.data)
    assert messages[1]["content"] == exercise.question
    assert exercise.reply(messages[2]["content"]) == messages[3]["content"]
    (call,) = messages[4]["tool_calls"]
    assert exercise.calculator(**call["function"]["arguments"]) == messages[5]["content"]
    assert exercise.result(json.dumps(messages[6]), library="openai").reward == 1.0


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "langgraph", "no_such_package")
    (message,) = AgentLibrariesTask(libraries=("langgraph", "openai_client")).errors()
    assert message.startswith("task.libraries has langgraph, which is not installed")


def test_the_embedded_tokenizer_and_template_are_those_that_the_code_builds() -> None:
    shipped = json.loads(Tokenizer.from_file(str(POLICY_DIR / "tokenizer.json")).to_str())
    built = json.loads(tokenizer().backend_tokenizer.to_str())
    for part in ("model", "pre_tokenizer", "added_tokens", "normalizer"):
        assert shipped[part] == built[part]
    assert (POLICY_DIR / "chat_template.jinja").read_text() == tokenizer().chat_template
    assert sum(path.stat().st_size for path in POLICY_DIR.iterdir()) <= 2 << 20


def test_the_ready_configuration_has_no_errors() -> None:
    errors = find_errors(config, read_policy_facts(POLICY_DIR), LAPTOP)
    assert [message for message in errors if not message.startswith("name is")] == []


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"libraries": ()}, "task.libraries"), ({"num_train_problems": 0}, "task.num_train_problems")],
)
def test_wrong_options_are_named(wrong: dict[str, Any], named: str) -> None:
    (message,) = AgentLibrariesTask(**wrong).errors()
    assert message.startswith(named)


def test_problems_go_to_the_libraries_in_turn() -> None:
    task = AgentLibrariesTask(libraries=("openai_agents", "pydantic_ai"))
    agents: list[Any] = [task.agent(make_problem("train", index, SIZES)) for index in range(4)]
    assert [agent.args for agent in agents] == [("openai_agents",), ("pydantic_ai",)] * 2
