"""An ordinary agent: the official `openai` client in a loop over calls of one tool.

The agent does not know that it is trained: it gets a client, a model's name and a question, and
works with every server of the OpenAI API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan_rl.experiments.calculator_agent.calculator import (
    CalculatorError,
    as_text,
    calculate,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SYSTEM_PROMPT = "Solve the problem with the calculator."

CALCULATOR: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "arithmetic",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The results of the agent's calls, and its last message.

    ``answer`` is None if the agent still called the tool in its last turn.
    """

    answer: str | None
    num_calls: int
    results: tuple[str, ...]
    messages: tuple[Mapping[str, Any], ...] = ()


async def solve(client: AsyncOpenAI, *, model: str, question: str, max_turns: int) -> Solution:
    """Ask the model, ``max_turns`` times at most, until it answers without a call."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    tools: list[Any] = [CALCULATOR]
    num_calls = 0
    results: list[str] = []
    answer = None
    for _ in range(max_turns):
        response = await client.chat.completions.create(model=model, messages=messages, tools=tools)
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            answer = message.content or ""
            break
        for call in message.tool_calls:
            num_calls += 1
            content = _call(call, results)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return Solution(
        answer=answer, num_calls=num_calls, results=tuple(results), messages=tuple(messages)
    )


def _call(call: Any, results: list[str]) -> str:
    """Return the tool's reply. If the call has a value, the value is added to ``results``."""
    if call.function.name != CALCULATOR["function"]["name"]:
        return f"error: there is no tool {call.function.name}"
    try:
        expression = json.loads(call.function.arguments)["expression"]
        result = as_text(calculate(expression))
    except CalculatorError as error:
        return f"error: {error}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "error: the arguments must be one expression"
    results.append(result)
    return result
