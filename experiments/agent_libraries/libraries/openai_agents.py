"""`openai-agents` with its default settings, so over the Responses API."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    Model,
    ModelBehaviorError,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)

from torchtitan_rl import AgentCall
from torchtitan_rl.experiments.agent_libraries.clients import openai_client
from torchtitan_rl.experiments.agent_libraries.exercise import INSTRUCTIONS, MAX_REQUESTS, Exercise

NO_TRACES = RunConfig(tracing_disabled=True)  # traces would be sent to OpenAI


async def solve(call: AgentCall, exercise: Exercise) -> str | None:
    async with openai_client(call) as client:
        model = OpenAIResponsesModel(model=call.model, openai_client=client)
        return await converse(model, exercise)


async def converse(model: Model, exercise: Exercise) -> str | None:
    tools = [function_tool(exercise.calculator)]
    agent = Agent(name="solver", instructions=INSTRUCTIONS, tools=tools, model=model)
    history: list[Any] = []
    message: str | None = exercise.question
    try:
        while message is not None:
            history.append({"role": "user", "content": message})
            result = await Runner.run(agent, history, max_turns=MAX_REQUESTS, run_config=NO_TRACES)
            history = result.to_input_list()
            message = exercise.reply(result.final_output)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return None
    return result.final_output
