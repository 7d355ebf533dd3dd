"""Agents in threads, as commands, and after a run was killed."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import sys
import threading
from dataclasses import dataclass

import pytest

from tests.support.agents import asked
from tests.support.resuming import SeededGenerate
from tests.support.rollouts import PROBLEM, make_rollouter
from torchtitan_rl.agents.agent import AgentCommand, AgentResult, run_agent
from torchtitan_rl.agents.env import AgentEnv, AgentHost, AgentThread, RunningAgent
from torchtitan_rl.agents.task import AgentTask, agent_errors
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import Problem, RolloutStatus

LONG_S = 30.0  # never waited for


def given(problem: Problem = PROBLEM):
    host = AgentHost(base_url="http://here/v1", model="policy", sessions=None, api_key="key")
    return host.call(problem, "session-1")


def python(code: str, **options) -> AgentCommand:
    return AgentCommand(argv=(sys.executable, "-c", code), **options)


def run_command(command: AgentCommand, problem: Problem = PROBLEM) -> AgentResult:
    return asyncio.run(run_agent(command, given(problem)))


async def work_of(agent, sessions: Sessions, *, loop=None, num_requests=1, **limits):
    """The rollout of an agent that cannot ask by itself; requests are made for it."""
    env: AgentEnv | None = None

    def environment(problem: Problem) -> AgentEnv:
        nonlocal env
        host = AgentHost(base_url="http://here/v1", model="m", sessions=sessions, loop=loop)
        env = AgentEnv(agent=agent, problem=problem, host=host)
        return env

    async def ask() -> None:
        while not sessions._open:
            await asyncio.sleep(0.001)
        (session_id,) = sessions._open
        for _ in range(num_requests):
            await sessions.complete(asked((1,), session_id))

    rollouter = make_rollouter(environment, generate=SeededGenerate(), **limits)
    asking = asyncio.create_task(ask())
    group = await rollouter.run_group("g", PROBLEM, size=1, seed=7)
    await asking
    return group.rollouts[0]


def test_a_command_gets_the_endpoint_and_its_problem():
    code = """
import json, os, sys
problem = json.load(sys.stdin)
assert problem == json.loads(os.environ["TORCHTITAN_RL_PROBLEM"])
print("thinking")
names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "TORCHTITAN_RL_MODEL", "TORCHTITAN_RL_SESSION_ID"]
assert [os.environ[name] for name in names] == ["http://here/v1", "key:session-1", "policy",
                                                "session-1"]
assert os.environ["MINE"] == "1"
print(json.dumps({"reward": problem["data"]["answer"], "metrics": {"tools": 2}}))
"""
    problem = Problem(problem_id="p", data={"answer": 4.5})
    result = run_command(python(code, environment={"MINE": "1"}), problem)
    assert result == AgentResult(reward=4.5, metrics={"tools": 2})


def test_a_command_inherits_no_keys_of_the_endpoint(monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_ADMIN_KEY", "secret")
    monkeypatch.setenv("TORCHTITAN_RL_API_KEY", "secret")
    code = "import os; print(sum('secret' in value for value in os.environ.values()))"
    assert run_command(python(code)).reward == 0


@pytest.mark.parametrize("output", ["", "done", "true", "[1]", '{"score": 1}', "1\nno", 9999 * "["])
def test_a_command_whose_last_line_is_no_reward_returned_none(output):
    assert run_command(python(f"print({output!r})")) == AgentResult()


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (python("import sys; sys.exit('no tool')"), "ended with exit code 1: no tool"),
        (python("import os; os.kill(os.getpid(), 9)"), "killed by signal 9"),
        (python("import time; time.sleep(30)", timeout_s=0.2), "timed out after 0.2 s"),
        (AgentCommand(argv=("/no/such/program",)), "No such file"),
    ],
)
def test_a_command_that_fails_is_a_rollout_with_that_cause(command, cause):
    rollout = asyncio.run(work_of(command, Sessions(None), num_requests=0))
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert cause in rollout.cause


def test_a_command_that_is_still_running_when_its_rollout_ends_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"""
import os, time
open({str(pid_file)!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""

    async def scenario():
        sessions = Sessions(None)
        rollout = await work_of(python(code), sessions, step_timeout_s=1.0)
        assert sessions.counts()["sessions_open"] == 0
        return rollout

    rollout = asyncio.run(scenario())
    assert rollout.status is RolloutStatus.STEP_TIMEOUT
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize("is_plain", [False, True])
def test_an_agent_that_blocks_does_not_block_the_loop_that_has_to_answer_it(is_plain):
    """Trap: blocking the event loop while waiting. On one loop this would never end: an async agent
    runs on the agents' loop, a plain function in a thread of its own."""
    answered = threading.Event()

    def plain(call):
        assert answered.wait(LONG_S)  # like the synchronous client
        return 1.0

    async def agent(call):
        return plain(call)

    async def scenario(loop):
        sessions = Sessions(None)
        work = work_of(plain, sessions) if is_plain else work_of(agent, sessions, loop=loop)
        task = asyncio.create_task(work)
        while sessions.counts()["session_turns"] == 0:
            await asyncio.sleep(0.001)
        answered.set()
        return await task

    with AgentThread() as agents:
        rollout = asyncio.run(scenario(agents.loop))
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)


@dataclass(frozen=True, kw_only=True)
class OneQuestion(AgentTask):
    def agent(self, problem):
        return functools.partial(answer_once, problem)


async def answer_once(problem, call):
    return 1.0


def test_a_task_of_agents_needs_the_endpoint():
    endpoint = EndpointConfig()
    (message,) = agent_errors(OneQuestion(), endpoint)
    assert message.startswith("endpoint.enabled is False: ")
    assert message.endswith("give --endpoint.enabled")
    enabled = dataclasses.replace(endpoint, enabled=True)
    assert agent_errors(OneQuestion(), enabled) == []
    assert agent_errors(OneQuestion(), enabled, num_rollouts=256) == []
    (message,) = agent_errors(OneQuestion(), enabled, num_rollouts=257)
    assert message.startswith("endpoint.max_concurrent_requests is 256: up to 257 agents ask at")
    assert message.endswith("give at least 257")
    assert agent_errors(Task(), endpoint) == []


def test_a_task_of_an_agent_that_raises_system_exit_ends_no_other_agent():
    async def exits():
        raise SystemExit(3)

    async def reckless(call):
        task = asyncio.ensure_future(exits())
        await asyncio.wait([task])
        return 1.0

    async def sound(call):
        await asyncio.sleep(0.05)
        return 2.0

    async def scenario():
        with AgentThread() as agents:
            ended = [asyncio.Event() for _ in range(3)]
            running = [
                RunningAgent(
                    functools.partial(run_agent, agent, given()), loop=agents.loop, on_end=event.set
                )
                for agent, event in zip((reckless, sound), ended, strict=False)
            ]
            for event in ended[:2]:
                await asyncio.wait_for(event.wait(), LONG_S)
            later = RunningAgent(
                functools.partial(run_agent, sound, given()), loop=agents.loop, on_end=ended[2].set
            )
            await asyncio.wait_for(ended[2].wait(), LONG_S)
            return [one.outcome.reward for one in (*running, later)]

    assert asyncio.run(scenario()) == [1.0, 2.0, 2.0]
