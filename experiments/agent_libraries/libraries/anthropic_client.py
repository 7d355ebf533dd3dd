"""The plain `anthropic` client, over the Messages API, in a loop over tool uses."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic

from torchtitan_rl import AgentCall
from torchtitan_rl.experiments.agent_libraries.exercise import INSTRUCTIONS, MAX_REQUESTS, Exercise
from torchtitan_rl.experiments.calculator_agent.agent import CALCULATOR


async def solve(call: AgentCall, exercise: Exercise) -> str | None:
    schema = CALCULATOR["function"]["parameters"]
    tool: Any = {"name": "calculator", "description": "arithmetic", "input_schema": schema}
    messages: list[Any] = [{"role": "user", "content": exercise.question}]
    base_url = call.base_url.removesuffix("/v1")  # this client adds it
    async with AsyncAnthropic(base_url=base_url, api_key=call.api_key) as client:
        for _ in range(MAX_REQUESTS):
            said = await client.messages.create(
                model=call.model,
                system=INSTRUCTIONS,
                messages=messages,
                tools=[tool],
                max_tokens=48,
            )
            messages.append({"role": "assistant", "content": said.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": part.id,
                    "content": exercise.checked_calculator(part.input),
                }
                for part in said.content
                if part.type == "tool_use"
            ]
            text = "".join(part.text for part in said.content if part.type == "text")
            reply = results or exercise.reply(text)
            if reply is None:
                return text
            messages.append({"role": "user", "content": reply})
    return None
