"""The same agent, once for each library, as a user of that library would write it.

Each module has a function that takes an `AgentCall` and an `Exercise` and returns the agent's last
message. Where the library gives up (too many turns, a tool that does not exist), it returns None.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Literal, get_args

from torchtitan_rl import AgentCall
from torchtitan_rl.experiments.agent_libraries.exercise import Exercise

Library = Literal[
    "openai_agents",
    "openai_agents_chat",
    "pydantic_ai",
    "smolagents",
    "langgraph",
    "openai_client",
    "anthropic_client",
]
Solve = Callable[[AgentCall, Exercise], str | Awaitable[str | None] | None]

LIBRARIES: tuple[Library, ...] = get_args(Library)
PACKAGES = {  # the package that each module imports
    "openai_agents": "agents",
    "openai_agents_chat": "agents",
    "pydantic_ai": "pydantic_ai",
    "smolagents": "smolagents",
    "langgraph": "langgraph",
    "openai_client": "openai",
    "anthropic_client": "anthropic",
}


def load(library: Library) -> Solve:
    """The agent of a library, which is imported now."""
    solve: Solve = import_module(f"{__name__}.{library}").solve
    return solve
