"""Environments of verifiers: their episodes, through a chat endpoint without a model."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_server import ChatServer, chat_server
from tests.support.verifiers import INTERPRETER, needs_verifiers
from torchtitan_rl.agents.agent import AgentCall, AgentResult
from torchtitan_rl.agents.verifiers.task import (
    _WORKER,
    EnvironmentSpec,
    VerifiersError,
    VerifiersTask,
)
from torchtitan_rl.types import Problem

FOLDERS = (str(Path(__file__).parents[2] / "support" / "verifiers_envs"),)
TASK = VerifiersTask(env="sums-v1", folders=FOLDERS)
NUMBERS = itertools.count()

pytestmark = needs_verifiers


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """verifiers keeps the folders of its rollouts there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("SUMS_KEY", "secret")  # of all processes only one may have it
        yield


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as served:
        yield served


def problem(**data: Any) -> Problem:
    task = {"idx": 1, "prompt": "1 + 1?", "answer": "2", **data}
    return Problem(problem_id="p", data={"split": "train", "task": task})


async def solve(server: ChatServer, task: VerifiersTask = TASK, **data: Any) -> AgentResult:
    session_id = f"torchtitan-rollout-{next(NUMBERS)}"
    call = AgentCall(
        base_url=server.base_url,
        api_key=f"key:{session_id}",
        model="policy",
        problem=problem(**data),
        session_id=session_id,
    )
    return await task.run(call)


def test_an_environment_that_kills_its_process_fails_its_rollouts_and_no_later_ones(
    server: ChatServer,
) -> None:
    with pytest.raises(VerifiersError, match=r"sums-v1: its process ended \(3\)"):
        asyncio.run(solve(server, fault="dies"))
    assert asyncio.run(solve(server)).reward == 0


def test_an_environment_has_the_variables_that_are_named_and_no_other_key(
    server: ChatServer,
) -> None:
    named = replace(TASK, variables=("SUMS_KEY",))
    found = [asyncio.run(solve(server, one)).metrics["has_key"] for one in (TASK, named)]
    assert found == [0.0, 1.0]


def test_reward_and_metrics_are_the_environments_and_requests_belong_to_the_rollout(
    server: ChatServer,
) -> None:
    server.reply = lambda messages: "It is 2."
    result = asyncio.run(solve(server))
    assert result.reward == 2
    assert result.metrics == {"turns": 1, "has_key": 0, "reward/right": 1, "truncated": 0}
    assert [message["content"] for message in result.messages] == ["1 + 1?", "It is 2."]
    ((key, session, _),) = server.asked
    assert key == "key"
    assert re.fullmatch(r"torchtitan-rollout-\d+\.1", session)


def test_a_rollout_that_the_run_has_ended_is_scored_as_far_as_it_came(server: ChatServer) -> None:
    server.reply = lambda messages: None
    assert asyncio.run(solve(server)).metrics["turns"] == 0


def test_a_cancelled_rollout_ends_in_its_process(server: ChatServer) -> None:
    async def cancelled() -> float | None:
        for moment in ("before it begins", "in a request"):
            running = asyncio.create_task(solve(server))
            await asyncio.sleep(0)
            while moment == "in a request" and not server.asked:
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        waits.clear()
        return (await solve(server)).reward

    waits = [True]

    def reply(messages: Any) -> str:
        while waits:
            time.sleep(0.01)
        return "2"

    server.reply = reply
    assert asyncio.run(cancelled()) == 2


@pytest.mark.slow
def test_turns_of_an_agent_that_is_not_trained_are_not_the_rollouts(server: ChatServer) -> None:
    def reply(messages: list[Any]) -> str:
        is_user = messages[0]["role"] == "system"
        return ("1 + 1?" if len(messages) == 2 else "###DONE###") if is_user else "2"

    server.reply = reply
    result = asyncio.run(solve(server, replace(TASK, env="user-sim+sums-v1")))
    assert result.reward == 2
    assert result.metrics["user_turns"] == 2
    user, assistant, same_user = (session for _, session, _ in server.asked)
    assert assistant.startswith("torchtitan-rollout-")
    assert not user.startswith("torchtitan-rollout-")
    assert server.deleted == [user] == [same_user]  # the endpoint recorded it


@pytest.mark.slow
def test_agents_that_are_trained_have_rewards_of_their_own(server: ChatServer) -> None:
    server.reply = lambda messages: "2" if len(server.asked) == 2 else "no"
    task = replace(TASK, env="best-of-n+sums-v1", args={"n": 3})
    result = asyncio.run(solve(server, task))
    assert result.part_rewards == {"1": 0, "2": 2, "3": 0}
    assert result.reward == pytest.approx(2 / 3)
    assert result.metrics["pass_at_n"] == 1


ERRORS = {
    '{"env": "nothing-v1"}': "ModuleNotFoundError: taskset 'nothing-v1' not found",
    '{"args": {"taskset.firsst": 1}}': "firsst Extra inputs are not permitted",
    '{"args": {"taskset.endless": true}}': "its tasks never end; give task.num_problems",
    '{"args": {"taskset.endless": true}, "num_problems": 3}': "3 tasks",
    '{"args": {"agent.retries.max_retries": 1}}': "agent.retries: what failed would be trained on",
    '{"args": {"agent.harness.id": "bash"}}': "say where by agent.runtime.type",
    '{"args": {"agent.harness.id": "codex", "agent.runtime.type": "subprocess"}}': (
        "'codex' needs a container runtime"
    ),
    '{"args": {"agent.harness.id": "null", "taskset.first": 7}}': "20 tasks",
}


def test_errors_of_the_environment_are_one_line() -> None:
    """All in one process, since verifiers takes seconds to import."""
    script = """
import json, sys, torchtitan_rl_worker as worker
for text in sys.argv[1:]:
    spec = {"env": "sums-v1", "args": {}, "num_problems": None} | json.loads(text)
    try:
        print(len(worker.tasks(worker.load(spec), spec["num_problems"])), "tasks")
    except Exception as error:
        print(worker.one_line(error))
"""
    environment = EnvironmentSpec(env="", folders=(str(_WORKER.parent), *FOLDERS)).environment()
    command = [INTERPRETER, "-c", script, *ERRORS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    assert len(lines) == len(ERRORS), ended.stderr
    for given, line, expected in zip(ERRORS, lines, ERRORS.values(), strict=True):
        assert expected in line, given


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"python": "/nowhere/python"}, "task.python='/nowhere/python': there is no such program"),
        ({"python": sys.executable}, "No module named 'verifiers' in "),
        ({"validation_share": 1.0}, "task.validation_share=1.0: must be between 0 and 1"),
    ],
)
def test_errors_of_the_configuration_name_field_and_fix(
    options: dict[str, Any], expected: str
) -> None:
    (error,) = replace(TASK, **options).errors()
    assert expected in error
