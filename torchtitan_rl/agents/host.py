"""What agents need of the process that runs them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from torchtitan_rl.agents.agent import AgentCall
from torchtitan_rl.agents.problem_queue import ProblemQueue
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHost:
    """Where agents find the endpoint, and where they run.

    ``loop``: the event loop of another thread that runs async agents (`AgentThread`). None is the
    current loop, which an agent that blocks would deadlock. ``problems``: where `RemoteAgent`s wait
    for workers.
    """

    base_url: str
    model: str
    sessions: Sessions
    api_key: str = field(default="", repr=False)  # empty: the endpoint has none
    loop: asyncio.AbstractEventLoop | None = None
    problems: ProblemQueue | None = None

    def call(self, problem: Problem, session_id: str) -> AgentCall:
        return AgentCall(
            base_url=self.base_url,
            api_key=f"{self.api_key or 'agent'}:{session_id}",
            model=self.model,
            problem=problem,
            session_id=session_id,
        )
