"""Tasks of reasoning-gym: problems, scores, splits, curricula, and errors of the configuration."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from torchtitan_rl.data.curriculum import CurriculumConfig
from torchtitan_rl.environments.gym_datasets import call_gym
from torchtitan_rl.environments.question import QuestionEnv
from torchtitan_rl.environments.reasoning_gym import ReasoningGymTask
from torchtitan_rl.rollout.task import AdaptiveDataset, Dataset, Outcome
from torchtitan_rl.sandbox.sandbox import SandboxError
from torchtitan_rl.types import Problem

pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.usefixtures("sandboxed")

TASK = ReasoningGymTask(
    tasks={"chain_sum": 3.0, "spell_backward": 1.0},
    options={"chain_sum": {"max_digits": 2}},
    num_problems=200,
    check_timeout_s=60.0,
)
CURRICULUM = CurriculumConfig(enabled=True, window=2, max_level=2)


def take(source: Dataset, count: int) -> list[Problem]:
    return [source.next() for _ in range(count)]


def test_problems_are_the_tasks_own_in_proportion_to_their_weights() -> None:
    assert TASK.errors() == []
    problems = take(TASK.dataset("train", seed=0), 40)
    assert [problem.task for problem in problems].count("chain_sum") == 30
    sums = [problem for problem in problems if problem.task == "chain_sum"]
    for problem in sums:
        expression = problem.data["question"].rpartition(": ")[2].removesuffix(" =")
        assert eval(expression) == int(problem.data["answer"])
        assert max(map(len, expression.split())) <= 2  # the option


def test_no_question_is_in_both_splits() -> None:
    task = replace(TASK, num_problems=2000)  # more than there are sums of one digit
    train, validation = (
        {one.data["question"] for one in take(task.dataset(split, seed=0), 500)}
        for split in ("train", "validation")
    )
    assert train
    assert validation
    assert not train & validation


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("I think <answer>1</answer>, no: <answer>{}</answer>", 1.0),
        ("<answer>\n{}\n</answer>", 1.0),
        ("{}", 0.0),  # not between the marks
        ("<answer>none</answer>", 0.0),
    ],
)
def test_a_completion_is_scored_by_the_task(answer: str, reward: float) -> None:
    problem = next(one for one in take(TASK.dataset("train", seed=0), 9) if one.task == "chain_sum")
    scored = asyncio.run(TASK.score(answer.format(problem.data["answer"]), problem))
    assert scored == pytest.approx(reward, abs=0.02)


def test_an_answer_that_the_task_s_scorer_fails_on_scores_0_and_is_counted() -> None:
    task = ReasoningGymTask(tasks={"prime_factorization": 1.0}, answer_pattern="")
    problem = task.dataset("train", seed=0).next()
    env = QuestionEnv([], partial(task.score, problem=problem))
    wrong, unreadable = (asyncio.run(env.step({"content": text})) for text in ("7", "x"))
    assert (wrong.reward < 0.1, wrong.metrics["check_errors"]) == (True, 0.0)
    assert unreadable.reward == 0.0
    assert unreadable.metrics == {"check_timeouts": 0.0, "check_errors": 1.0}


def test_another_problem_than_the_one_that_was_asked_is_an_error() -> None:
    problem = TASK.dataset("train", seed=0).next()
    other = replace(problem, data={**problem.data, "question": "1 + 1 ="})
    with pytest.raises(SandboxError, match=r"makes problem \d+ differently"):
        asyncio.run(TASK.score("<answer>2</answer>", other))


def one_of_each(names: Sequence[str]) -> dict[str, Any]:
    """The first problem of each task."""
    tasks = {name: ReasoningGymTask(tasks={name: 1.0}, num_problems=20) for name in names}
    return {name: task.dataset("train", seed=0).next().data for name, task in tasks.items()}


def with_hash_seed(hash_seed: str, names: Sequence[str]) -> dict[str, Any]:
    """`one_of_each` of a process with that hash seed."""
    code = f"import json; from {__name__} import *; print(json.dumps(one_of_each({names})))"
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    found: dict[str, Any] = json.loads(
        subprocess.check_output([sys.executable, "-c", code], env=env)
    )
    return found


def test_problems_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    names = ["isomorphic_strings", "ransom_note"]
    assert with_hash_seed("1", names) == one_of_each(names)


# Three of those whose scorer evaluates the answer as Python; the soak test has all.
EVALUATED = ("countdown", "polynomial_multiplication", "spiral_matrix")
FORGED = (  # 3 is where the sandboxed process writes its result
    "(__import__('os').write(3, b'{\"result\": 1.0}'), __import__('os')._exit(0))"
)


async def rewards_of(name: str) -> list[float]:
    """Of the right answer to a problem, of a program, and of that with a wrong bracket."""
    task = ReasoningGymTask(tasks={name: 1.0}, num_problems=20, check_timeout_s=60.0)
    problem = task.dataset("train", seed=0).next()
    env = QuestionEnv([], partial(task.score, problem=problem))
    return [
        (await env.step({"content": f"<answer>{answer}</answer>"})).reward
        for answer in (problem.data["answer"], FORGED, f"[{FORGED[1:]}")
    ]


async def rewards_of_all(names: Sequence[str]) -> dict[str, list[float]]:
    return {name: await rewards_of(name) for name in names}


def test_an_answer_that_is_a_program_cannot_forge_its_score() -> None:
    for right, forged, wrong in asyncio.run(rewards_of_all(EVALUATED)).values():
        assert right == 1.0
        assert forged == wrong <= 0.01


@pytest.mark.soak
def test_every_task_makes_the_same_problems_knows_its_answer_and_resists_a_program() -> None:
    names = sorted(call_gym("gym_names").keys() - {"composite"})  # which is made of others
    assert with_hash_seed("1", names) == with_hash_seed("2", names)
    rewards = asyncio.run(rewards_of_all(names))
    without_answer = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    assert {name for name, of in rewards.items() if of[0] < 1.0} == without_answer
    assert [name for name, (_, forged, wrong) in rewards.items() if forged != wrong] == []


def test_the_level_rises_with_success_and_survives_a_checkpoint() -> None:
    task = replace(TASK, tasks={"chain_sum": 1.0}, options={}, curriculum=CURRICULUM)
    assert task.errors() == []
    source = task.dataset("train", seed=0)
    levels = []
    for _ in range(6):
        problem = source.next()
        levels.append((problem.task, problem.data["level"]))
        assert isinstance(source, AdaptiveDataset)
        source.record([Outcome(problem=problem, solved=1.0)])
        state = json.loads(json.dumps(source.state_dict()))
        source = task.dataset("train", seed=1)
        source.load_state_dict(state)
    assert levels == [(f"chain_sum/level{level}", level) for level in (0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": {}}, "task.tasks is empty"),
        ({"tasks": {"chain_sums": 1.0}}, "task.tasks has chain_sums: .* similar: chain_sum"),
        ({"tasks": {"chain_sum": 0.0}}, "task.tasks.chain_sum is 0.0: give a weight above 0"),
        ({"options": {"chain_sum": {"digits": 1}}}, "task.options.chain_sum is .*'digits'"),
        ({"options": {"chain_sum": {"max_terms": 1}}}, "task.options.chain_sum is .*max_terms"),
        ({"options": {"chain_sum": {"max_terms": {4}}}}, "task.options.chain_sum is .* JSON"),
        ({"options": {"gcd": {}}}, "task.options has gcd, which is not in task.tasks"),
        (
            {"tasks": {"acre": 1.0}, "curriculum": CurriculumConfig(enabled=True)},
            "task.curriculum.enabled: acre has no curriculum",
        ),
        (
            {"tasks": {"survo": 1.0}, "curriculum": CurriculumConfig(enabled=True)},
            r"task.curriculum: level \d of survo is not possible",
        ),
        ({"answer_pattern": "("}, r"task.answer_pattern='\(': not a regular expression"),
    ],
)
def test_what_is_wrong_is_said_with_the_field(changes: dict[str, Any], message: str) -> None:
    task = replace(TASK, **({"options": {}} | changes))
    assert any(re.match(message, error) for error in task.errors()), task.errors()
