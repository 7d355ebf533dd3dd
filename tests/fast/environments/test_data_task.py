"""Rows to problems, completions to rewards, and every error of the configuration in one line."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_rl.data.curriculum import RestConfig
from torchtitan_rl.data.rows import DataError
from torchtitan_rl.environments.data_task import DataTask
from torchtitan_rl.environments.question import QuestionEnv
from torchtitan_rl.rollout.task import Split
from torchtitan_rl.types import Problem

ROWS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}", "level": n % 5} for n in range(100)]


def write(folder: Path, rows: list[dict[str, Any]] = ROWS, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def task(tmp_path: Path) -> DataTask:
    return DataTask(train=(write(tmp_path),))


def problems(task: DataTask, split: Split = "train") -> list[Problem]:
    """Those of one epoch."""
    source, found = task.dataset(split, seed=0), []
    while True:
        problem = source.next()
        if source.epoch:
            return found
        found.append(problem)


def score(task: DataTask, answer: str, right: str = "7") -> float:
    problem = Problem(problem_id="p", data={"answer": right})
    return asyncio.run(task.score(answer, problem))


def test_a_problem_is_the_filled_prompt_and_the_right_answer(task: DataTask) -> None:
    task = replace(
        task, system="Level {level}.", right_answer_pattern=r"#### (\d+)", keep=("level",)
    )
    found = {problem.problem_id: problem.data for problem in problems(task)}
    assert task.errors() == []
    assert found["rows.jsonl:8"] == {
        "messages": [
            {"role": "system", "content": "Level 2."},
            {"role": "user", "content": "7 + 1?"},
        ],
        "answer": "8",
        "level": 2,
    }


def test_splits_of_one_file_share_no_prompt_and_lose_no_row(tmp_path: Path) -> None:
    task = DataTask(train=(write(tmp_path, ROWS * 2),), validation_share=0.3)
    train, validation = problems(task), problems(task, "validation")
    assert len(train) + len(validation) == 200
    assert 30 < len(validation) < 90
    texts = [{json.dumps(p.data["messages"]) for p in split} for split in (train, validation)]
    assert not texts[0] & texts[1]


@pytest.mark.parametrize(
    ("compare", "pattern", "answer", "reward"),
    [
        ("exact", "", " 7\n", 1.0),
        ("exact", r"#### (.+)", "2 + 5 #### 7", 1.0),
        ("exact", r"#### (.+)", "7", 0.0),
        ("number", "", "about 7.0", 1.0),
        ("math", "", "$\\frac{14}{2}$", 1.0),
        ("math", "", "8", 0.0),
    ],
)
def test_a_completion_is_scored(
    task: DataTask, compare: Any, pattern: str, answer: str, reward: float
) -> None:
    task = replace(task, compare=compare, answer_pattern=pattern, check_timeout_s=60.0)
    assert score(task, answer) == reward


def test_an_answer_that_takes_too_long_to_compare_scores_0_and_is_counted(task: DataTask) -> None:
    task = replace(task, compare="math", check_timeout_s=1.0)
    problem = Problem(problem_id="p", data={"answer": "7"})

    async def rewarded() -> Any:
        env = QuestionEnv([], lambda answer: task.score(answer, problem))
        return await env.step({"role": "assistant", "content": "$9^{9^{9^{9^{9}}}}$"})

    terminal = asyncio.run(rewarded())
    assert (terminal.reward, terminal.metrics) == (
        0.0,
        {"check_timeouts": 1.0, "check_errors": 0.0},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "{question"}, "task.prompt='{question': expected '}'"),
        ({"answer_pattern": "("}, "task.answer_pattern='(': not a regular expression"),
        ({"where": ("level",)}, "task.where: 'level' is not a condition"),
        ({"validation_share": 0.0}, "task.validation_share is 0: give more, or give files"),
        ({"train": ()}, "task.train is empty"),
        ({"train": ("none.jsonl",)}, "task.train: none.jsonl: there is no such file"),
        ({"validation": ("none.parquet",)}, "task.validation: none.parquet: there is no such"),
        ({"rest": RestConfig(hard_at=1.0)}, "task.rest.hard_at=1.0: must be below"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_field(
    task: DataTask, changes: dict[str, Any], message: str
) -> None:
    (error,) = replace(task, **changes).errors()
    assert error.startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "{problem}"}, r"rows\.jsonl, line \d+, task\.prompt: no column 'problem'"),
        (
            {"messages": "question"},
            r"rows\.jsonl, line \d+, task\.messages: column 'question' is not a list",
        ),
        (
            {"right_answer_pattern": "x"},
            r"rows\.jsonl, line \d+: no match of task\.right_answer_pattern",
        ),
        ({"keep": ("x",)}, r"rows\.jsonl, line \d+, task\.keep: no column 'x'"),
    ],
)
def test_what_does_not_fit_a_row_names_its_line(
    task: DataTask, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        replace(task, **changes).dataset("train", seed=0).next()
