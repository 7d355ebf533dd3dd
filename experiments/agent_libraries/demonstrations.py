"""Conversations to imitate, in the two forms that the libraries' agents have.

Most libraries end with a message; `pydantic-ai` with a call of ``final_result``. Mistakes are those
of `calculator_agent`; to guess is to make the missing number up instead of asking for it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.experiments.agent_libraries.exercise import INSTRUCTIONS, reply_text
from torchtitan_rl.experiments.calculator_agent.agent import CALCULATOR
from torchtitan_rl.experiments.calculator_agent.demonstrations import (
    Mistakes,
    shown_result,
    with_mistakes,
    with_other_digit,
)
from torchtitan_rl.experiments.calculator_agent.tokenizer import answer_text

QUESTION = "Which number is missing?"
FINAL_RESULT: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "final_result",
        "description": "the answer",
        "parameters": {"type": "object", "properties": {"number": {"type": "number"}}},
    },
}
MESSAGE_FORM = (CALCULATOR,)  # the tools of each form
STRUCTURED_FORM = (CALCULATOR, FINAL_RESULT)


def conversation(
    problem: Mapping[str, Any],
    mistakes: Mistakes,
    *,
    tools: tuple[Mapping[str, Any], ...],
    rng: random.Random,
) -> list[dict[str, Any]]:
    """The messages of a solution; each mistake is drawn independently."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": problem["text"]},
    ]
    expression = problem["expression"]
    if rng.random() < mistakes.guess:
        guess = str(rng.randint(2, 99))
        expression = re.sub(rf"\b{problem['missing']}\b", guess, expression, count=1)
    else:
        messages += [
            {"role": "assistant", "content": QUESTION},
            {"role": "user", "content": reply_text(problem["missing"])},
        ]
    expression = with_mistakes(expression, mistakes, rng=rng)
    result = shown_result(expression)
    messages += [
        _call("calculator", expression=expression),
        {"role": "tool", "content": result},
    ]
    if rng.random() < mistakes.report:
        result = with_other_digit(result, rng=rng)
    return [*messages, _last_message(result, tools)]


def _last_message(result: str, tools: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    """After an error it is a message in both forms."""
    if FINAL_RESULT in tools and re.fullmatch(r"-?\d+(\.\d+)?", result):
        return _call("final_result", number=float(result) if "." in result else int(result))
    return {"role": "assistant", "content": answer_text(result)}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
