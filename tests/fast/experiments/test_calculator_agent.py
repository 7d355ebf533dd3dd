"""The calculator's agent: its loop with the real `openai` client, arithmetic, scores, tokens."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import httpx
import pytest

from torchtitan_rl.experiments.calculator_agent.agent import (
    CALCULATOR,
    SYSTEM_PROMPT,
    Solution,
    solve,
)
from torchtitan_rl.experiments.calculator_agent.calculator import (
    CalculatorError,
    calculate,
)
from torchtitan_rl.experiments.calculator_agent.task import is_right, score
from torchtitan_rl.experiments.calculator_agent.token_audit import (
    TurnTokens,
)
from torchtitan_rl.experiments.calculator_agent.warm_start import (
    build_tokenizer,
)


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


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "2+",
        "1/0",
        "1/(2-2)",
        "2**9",
        "7//2",
        "()",
        "5(3)",
        "1.2.3",
        "012",
        "4\n+4",
        "x+1",
        "True",
        "1j",
        "1e9",
        "(1,)",
        "__import__('os').getcwd()",
        "9*" * 40 + "9",
        "(" * 32 + "1" + ")" * 31,
    ],
)
def test_what_is_not_arithmetic_is_refused_with_a_reason(expression: str) -> None:
    with pytest.raises(CalculatorError, match=r"\w"):
        calculate(expression)


def solution(answer: str | None, *results: str) -> Solution:
    return Solution(answer=answer, num_calls=len(results), results=results)


@pytest.mark.parametrize(
    ("solved", "reward"),
    [
        (solution("The answer is 14.", "14"), 1.0),
        (solution("The answer is 14."), 1.0),
        (solution("First 3, then 14", "7"), 1.0),
        (solution("14.0"), 1.0),
        (solution("The answer is 41.", "7", "14"), 0.3),
        (solution(None, "14"), 0.3),
        (solution("", "14"), 0.3),
        (solution("The answer is 7.", "7"), 0.1),
        (solution(None, "7"), 0.1),
        (solution("The answer is 7."), 0.0),
        (solution("14 is not it, 7 is."), 0.0),
        (solution("-14"), 0.0),
        (solution("114"), 0.0),
        (solution("no number"), 0.0),
        (solution(None), 0.0),
    ],
)
def test_a_right_answer_counts_most_then_a_right_result_then_any_result(
    solved: Solution, reward: float
) -> None:
    assert score(solved, 14) == reward
    assert is_right(solved, 14) == (reward == 1.0)


FIRST, SECOND = TurnTokens((1,), (2,)), TurnTokens((1, 2, 3), (4,))


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+3*4"}}</tool_call>'


@cache
def tokenizer() -> Any:
    return build_tokenizer()


def encode(text: str) -> list[int]:
    return tokenizer().backend_tokenizer.encode(text).ids


def as_sent_back(call_ids: list[str], expressions: list[str], content: str | None) -> Any:
    """What vLLM hands to the template for an assistant's message that a client sends back: the
    arguments, which hermes' parser wrote as JSON, are read again."""
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {
                "name": "calculator",
                "arguments": json.loads(json.dumps({"expression": expression})),
            },
        }
        for call_id, expression in zip(call_ids, expressions, strict=True)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize(
    ("expressions", "content"),
    [(["12+3*4"], None), (["(1+2)/3", "7-4"], "I call it."), (['é"\\1'], "")],
)
def test_a_call_that_comes_back_is_rendered_as_it_was_sampled(
    expressions: list[str], content: str | None
) -> None:
    opening: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "How many?"},
    ]
    ids = [str(place) for place in range(len(expressions))]
    sampled = (content or "") + "".join(
        CALL.replace("12+3*4", json.dumps(expression, ensure_ascii=False)[1:-1])
        for expression in expressions
    )
    results = [{"role": "tool", "tool_call_id": i, "content": "5"} for i in ids]
    history = [*opening, as_sent_back(ids, expressions, content), *results]

    def prompt(messages: list[dict[str, Any]]) -> list[int]:
        text = tokenizer().apply_chat_template(
            messages, tools=[CALCULATOR], tokenize=False, add_generation_prompt=True
        )
        return encode(text)

    seen = prompt(opening) + encode(f"{sampled}<|im_end|>")
    after = prompt(history)
    assert after[: len(seen)] == seen
    responses = "<tool_response>5</tool_response>" * len(ids)
    expected = f"\n<|im_start|>user\n{responses}<|im_end|>\n<|im_start|>assistant\n"
    assert after[len(seen) :] == encode(expected)
