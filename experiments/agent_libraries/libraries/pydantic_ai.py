"""`pydantic-ai`: the agent's question is text, and its answer is a structured output."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from torchtitan_rl import AgentCall
from torchtitan_rl.experiments.agent_libraries.clients import openai_client
from torchtitan_rl.experiments.agent_libraries.exercise import INSTRUCTIONS, Exercise


class Answer(BaseModel):
    """the answer"""

    number: float


async def solve(call: AgentCall, exercise: Exercise) -> str | None:
    async with openai_client(call) as client:
        agent = Agent(
            OpenAIChatModel(call.model, provider=OpenAIProvider(openai_client=client)),
            instructions=INSTRUCTIONS,
            tools=[exercise.calculator],
            output_type=[str, Answer],
        )
        history = None
        message: str | None = exercise.question
        try:
            while message is not None:
                result = await agent.run(message, message_history=history)
                if isinstance(result.output, Answer):
                    return f"{result.output.number:g}"
                history = result.all_messages()
                message = exercise.reply(result.output)
        except UnexpectedModelBehavior:
            return None
        return result.output
