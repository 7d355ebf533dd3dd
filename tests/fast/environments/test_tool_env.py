"""Questions that are answered with tools: calls, their errors, and the tokens of a conversation."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from torchtitan_rl.environments.data_task import DataTask
from torchtitan_rl.environments.mcp import McpServer, McpTask
from torchtitan_rl.environments.question import ToolAnswer, ToolEnv
from torchtitan_rl.experiments.calculator_agent.task import POLICY_DIR
from torchtitan_rl.rollout.env import Terminal


class Doubling:
    """One tool, which doubles numbers and fails for others."""

    schema: Mapping[str, Any] = {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Doubles.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
        },
    }

    def __init__(self) -> None:
        self.is_closed = False

    async def open(self) -> Sequence[Mapping[str, Any]]:
        return [self.schema]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        if name != "double":
            return ToolAnswer(text=f"error: no tool {name}", failed=True)
        return ToolAnswer(text=str(2 * arguments["number"]))

    async def close(self) -> None:
        self.is_closed = True


async def is_eight(answer: str) -> float:
    return float(answer == "8")


def make_env() -> ToolEnv:
    return ToolEnv([{"role": "user", "content": "4 * 2?"}], Doubling(), is_eight)


def calls(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in pairs]
    return [{"type": "function", "function": function} for function in functions]


def test_calls_are_answered_in_their_order_and_errors_are_told() -> None:
    async def rollout() -> None:
        env = make_env()
        assert (await env.reset()).tools == [Doubling.schema]
        answer = await env.step(
            {
                "content": "",
                "tool_calls": calls(
                    ("double", {"number": 4}),
                    ("double", '{"number": 3}'),
                    ("halve", {}),
                    ("double", "7"),
                    ("double", "{"),
                ),
                "invalid_tool_calls": ["{nonsense"],
            }
        )
        assert not isinstance(answer, Terminal)
        assert [message["role"] for message in answer.messages] == ["tool"] * 6
        assert [message["content"] for message in answer.messages] == [
            "8",
            "6",
            "error: no tool halve",
            "error: the arguments are not a JSON object",
            "error: the arguments are not a JSON object",
            "error: not a call with a name and arguments in JSON: {nonsense",
        ]
        end = await env.step({"content": "8"})
        assert isinstance(end, Terminal)
        assert end.reward == 1.0
        checks = {"check_timeouts": 0, "check_errors": 0}
        assert end.metrics == {"tool_calls": 6, "failed_tool_calls": 4, **checks}

    asyncio.run(rollout())


class Meeting(Doubling):
    """Each call waits for another."""

    def __init__(self) -> None:
        super().__init__()
        self.num_cancelled = 0
        self._all_called = asyncio.Barrier(2)

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        if name == "lose":
            raise RuntimeError("the tools are lost")
        try:
            async with asyncio.timeout(5):
                await self._all_called.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        await asyncio.sleep(0.01 * arguments["number"])
        return await super().call(name, arguments)


def test_the_calls_of_one_message_run_at_once_and_are_answered_in_their_order() -> None:
    async def rollout() -> None:
        env = ToolEnv([{"role": "user", "content": "4 * 2?"}], Meeting(), is_eight)
        await env.reset()
        two = calls(("double", {"number": 4}), ("double", {"number": 3}))
        answer = await env.step({"content": "", "tool_calls": two})
        assert not isinstance(answer, Terminal)
        assert [message["content"] for message in answer.messages] == ["8", "6"]

    asyncio.run(rollout())


def test_no_call_outlives_one_that_lost_the_tools() -> None:
    async def rollout() -> None:
        tools = Meeting()
        env = ToolEnv([{"role": "user", "content": "4 * 2?"}], tools, is_eight)
        await env.reset()
        two = calls(("double", {"number": 4}), ("lose", {}))
        with pytest.raises(RuntimeError, match="the tools are lost"):
            await env.step({"content": "", "tool_calls": two})
        assert tools.num_cancelled == 1

    asyncio.run(rollout())


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServer(), "task.servers.s: give either command or url"),
        (
            McpServer(url="http://b", shared=True, in_order=True),
            "task.servers.s: shared and in_order are True",
        ),
        (McpServer(command=("a",), url="http://b"), "task.servers.s: give either command or url"),
        (McpServer(url="b:80"), "task.servers.s.url='b:80': must begin with http:// or https://"),
        (
            McpServer(command=("no-such-program", "x")),
            "task.servers.s.command: there is no program 'no-such-program'; install it",
        ),
        (
            McpServer(command=(sys.executable,), env={"KEY": "a-${NO_SUCH_VARIABLE}"}),
            "task.servers.s.env: KEY names NO_SUCH_VARIABLE, which is not set",
        ),
        (
            McpServer(url="http://127.0.0.1:9/mcp", headers={"A": "Bearer $NO_SUCH_VARIABLE"}),
            "task.servers.s.headers: A names NO_SUCH_VARIABLE, which is not set",
        ),
        (
            McpServer(url="http://127.0.0.1:9/mcp"),
            "task.servers.s.url='http://127.0.0.1:9/mcp': no server answers (ConnectError: ",
        ),
    ],
)
def test_what_is_wrong_with_a_server_is_said(server: McpServer, message: str) -> None:
    files = DataTask(train=(str(POLICY_DIR / "config.json"),))
    task = McpTask(train=files.train, servers={"s": server})
    (error,) = task.errors()
    assert error.startswith(message)
    assert replace(task, servers={}).errors() == ["task.servers is empty: give a server"]
