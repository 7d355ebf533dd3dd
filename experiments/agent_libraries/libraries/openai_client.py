"""The plain `openai` client, in a loop over tool calls."""

from __future__ import annotations

import json
from typing import Any

from torchtitan_rl import AgentCall
from torchtitan_rl.experiments.agent_libraries.clients import openai_client
from torchtitan_rl.experiments.agent_libraries.exercise import INSTRUCTIONS, MAX_REQUESTS, Exercise
from torchtitan_rl.experiments.calculator_agent.agent import CALCULATOR


async def solve(call: AgentCall, exercise: Exercise) -> str | None:
    tools: list[Any] = [CALCULATOR]
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": exercise.question},
    ]
    async with openai_client(call) as client:
        for _ in range(MAX_REQUESTS):
            response = await client.chat.completions.create(
                model=call.model, messages=messages, tools=tools
            )
            said: Any = response.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            for used in said.tool_calls or []:
                result = exercise.checked_calculator(json.loads(used.function.arguments))
                messages.append({"role": "tool", "tool_call_id": used.id, "content": result})
            if not said.tool_calls:
                reply = exercise.reply(said.content or "")
                if reply is None:
                    return said.content or ""
                messages.append({"role": "user", "content": reply})
    return None
