"""`openai-agents` over Chat Completions: only the model differs."""

from __future__ import annotations

from agents import OpenAIChatCompletionsModel

from torchtitan_rl import AgentCall
from torchtitan_rl.experiments.agent_libraries.clients import openai_client
from torchtitan_rl.experiments.agent_libraries.exercise import Exercise
from torchtitan_rl.experiments.agent_libraries.libraries.openai_agents import converse


async def solve(call: AgentCall, exercise: Exercise) -> str | None:
    async with openai_client(call) as client:
        model = OpenAIChatCompletionsModel(model=call.model, openai_client=client)
        return await converse(model, exercise)
