"""The agent's loop, with the real `openai` client on a scripted server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from torchtitan_rl.experiments.calculator_agent.agent import Solution, solve

pytestmark = pytest.mark.slow  # importing the client takes a second or two


class ScriptedServer:
    """Answers each chat request with the next message, and keeps what it was asked."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = list(messages)
        self.requests: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        message = {"role": "assistant", "content": None} | self._messages.pop(0)
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return httpx.Response(200, json=body | {"choices": [choice]})


def call(arguments: str, *, name: str = "calculator", call_id: str = "1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def calls(*expressions: str) -> dict[str, Any]:
    made = [
        call(json.dumps({"expression": expression}), call_id=str(place))
        for place, expression in enumerate(expressions)
    ]
    return {"tool_calls": made}


def run(server: ScriptedServer, *, max_turns: int = 4) -> Solution:
    from openai import AsyncOpenAI

    async def main() -> Solution:
        transport = httpx.AsyncClient(transport=httpx.MockTransport(server))
        async with AsyncOpenAI(
            base_url="http://x/v1", api_key="k", http_client=transport
        ) as client:
            return await solve(client, model="m", question="q", max_turns=max_turns)

    return asyncio.run(main())


def told(server: ScriptedServer) -> list[str]:
    """What the tool said in the last request."""
    messages = server.requests[-1]["messages"]
    return [message["content"] for message in messages if message["role"] == "tool"]


def test_a_called_expression_is_evaluated_and_the_answer_returned() -> None:
    server = ScriptedServer(calls("2+3*4"), {"content": "The answer is 14."})
    solution = run(server)
    assert (solution.answer, solution.num_calls) == ("The answer is 14.", 1)
    assert solution.results == ("14",)
    first, second = (request["messages"] for request in server.requests)
    assert [message["role"] for message in first] == ["system", "user"]
    assert second[:2] == first
    assert second[2]["tool_calls"] == calls("2+3*4")["tool_calls"]
    assert second[3] == {"role": "tool", "tool_call_id": "0", "content": "14"}
    assert list(solution.messages[:-1]) == second
    assert solution.messages[-1]["content"] == "The answer is 14."
    assert server.requests[0]["tools"][0]["function"]["name"] == "calculator"


def test_each_of_several_calls_gets_its_own_result() -> None:
    server = ScriptedServer(calls("1+1", "2*3"), {"content": "6"})
    assert run(server).results == ("2", "6")
    assert told(server) == ["2", "6"]


@pytest.mark.parametrize(
    "bad",
    [
        call('{"expression": "1/0"}'),
        call('{"expression": "import os"}'),
        call('{"expression": 3}'),
        call('{"question": "1+1"}'),
        call("1+1"),
        call('["1+1"]'),
        call('{"expression": "1+1"}', name="shell"),
    ],
)
def test_a_call_that_cannot_be_evaluated_gets_an_error_and_the_loop_continues(
    bad: dict[str, Any],
) -> None:
    server = ScriptedServer({"tool_calls": [bad]}, calls("1+1"), {"content": "2"})
    solution = run(server)
    assert (solution.answer, solution.num_calls, solution.results) == ("2", 2, ("2",))
    assert told(server)[0].startswith("error: ")


def test_an_agent_that_only_calls_ends_without_an_answer() -> None:
    server = ScriptedServer(*[calls("1+1")] * 3)
    solution = run(server, max_turns=3)
    assert (solution.answer, solution.num_calls, solution.results) == (None, 3, ("2",) * 3)


def test_no_content_at_all_is_an_empty_answer() -> None:
    assert run(ScriptedServer({"content": None})).answer == ""
