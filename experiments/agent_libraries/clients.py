"""The `openai` client of one rollout; its API key names the rollout's session."""

from __future__ import annotations

import httpx2
from openai import AsyncOpenAI

from torchtitan_rl import AgentCall


def openai_client(call: AgentCall) -> AsyncOpenAI:
    """Make a client without a TLS context: the endpoint is plain HTTP, and a context takes
    20 ms."""
    return AsyncOpenAI(
        base_url=call.base_url,
        api_key=call.api_key,
        http_client=httpx2.AsyncClient(verify=False),
    )
