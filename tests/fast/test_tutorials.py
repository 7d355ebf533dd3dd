"""The example files of the tutorials do what their pages say. Their commands are run in
`test_documented_commands.py`."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchtitan_rl as rl
from tests.support.chat_server import chat_server
from tests.support.documentation import PAGES, write_example_files

NAMES = ("backward", "chain", "vote", "strict", "best", "distance")


@pytest.fixture
def tutorials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    for page in PAGES:
        if "tutorials" in page:
            write_example_files(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name)


@pytest.mark.parametrize("name", ["backward", "chain", "vote"])
def test_the_splits_of_a_task_have_no_problem_in_common(name: str, tutorials: Any) -> None:
    task = tutorials[name].config.task
    train, validation = (
        {dataset.next().problem_id for _ in range(40)}
        for dataset in (task.dataset(split, seed=0) for split in ("train", "validation"))
    )
    assert train.isdisjoint(validation)
    assert len(train) == len(validation) == 40


def test_the_score_is_the_share_of_the_letters_that_are_right(tutorials: Any) -> None:
    score = tutorials["backward"].score
    assert asyncio.run(score("abcd", right="abcd")) == 1.0
    assert asyncio.run(score("abxx", right="abcd")) == 0.5
    assert asyncio.run(score("", right="abcd")) == 0.0


def test_each_right_sum_of_a_chain_is_rewarded_in_its_turn(tutorials: Any) -> None:
    async def play(answers: list[str]) -> list[Any]:
        env = tutorials["chain"].ChainEnv([1, 2, 3, 4])
        await env.reset()
        return [await env.step({"content": answer}) for answer in answers]

    first, second, end = asyncio.run(play(["3", "0", "10"]))
    assert (first.turn_reward, second.turn_reward, end.turn_reward) == (1, 0, 1)
    assert (second.messages[0]["content"][-7:], end.reward) == ("6 + 4 =", 2)


def test_the_answer_with_most_votes_wins(tutorials: Any) -> None:
    said = iter(["7", "7", "8"])
    problem = rl.Problem(problem_id="p", data={"question": "3 + 4 =", "answer": "7"})
    with chat_server() as server:
        server.reply = lambda messages: next(said)
        call = rl.AgentCall(
            base_url=server.base_url, api_key="k", model="m", problem=problem, session_id="s"
        )
        result = asyncio.run(tutorials["vote"].vote(call))
    assert (result.reward, result.metrics) == (1.0, {"votes": 2})


def rollout(reward: float) -> rl.Rollout:
    return rl.Rollout(
        rollout_id="r",
        group_id="g",
        problem_id="p",
        turns=(),
        status=rl.RolloutStatus.COMPLETED,
        reward=reward,
    )


def test_the_parts_of_the_reward_are_weighted(tutorials: Any) -> None:
    rubric = tutorials["strict"].config.task.rubric()
    scores = [asyncio.run(rubric.score(rollout(reward), None)) for reward in (0.5, 1.0)]
    assert [score.reward for score in scores] == [0.25, 1.0]


def test_the_best_of_a_group_gets_all(tutorials: Any) -> None:
    rubric = tutorials["best"].config.task.rubric()
    scores = asyncio.run(rubric.score_group([rollout(0.25), rollout(0.5)], None))
    assert [score.reward for score in scores] == [0.0, 1.0]
