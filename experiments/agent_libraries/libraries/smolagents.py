"""`smolagents`: the agent does everything by tool calls, even its answer, and its client blocks."""

from __future__ import annotations

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from torchtitan_rl import AgentCall
from torchtitan_rl.experiments.agent_libraries.exercise import INSTRUCTIONS, MAX_REQUESTS, Exercise


def solve(call: AgentCall, exercise: Exercise) -> str | None:
    agent = ToolCallingAgent(
        tools=[tool(exercise.calculator)],
        model=OpenAIModel(call.model, api_base=call.base_url, api_key=call.api_key),
        max_steps=MAX_REQUESTS,
        verbosity_level=LogLevel.OFF,
    )
    # The library's own prompt is far too long for the policy.
    agent.prompt_templates["system_prompt"] = INSTRUCTIONS
    said = str(agent.run(exercise.question))
    while (message := exercise.reply(said)) is not None:
        said = str(agent.run(message, reset=False))
    return said
