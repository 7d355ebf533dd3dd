"""Compares, during a run, the tokens that the agent's client received with the trained tokens.

The client's transport adds a request for token ids to each of the agent's requests, and records the
token ids of the answers. The environment records the prompt and the completion of each turn of the
rollout. The rollout's metrics count the compared turns and the turns that differ;
``token_mismatches`` must be 0. The agent is not changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import httpx

from torchtitan_rl import AgentEnv, RolloutStatus, Terminal, TreeEnv, TurnTree


class TurnTokens(NamedTuple):
    prompt: tuple[int, ...]
    completion: tuple[int, ...]


class TokenIdTransport(httpx.AsyncBaseTransport):
    """Passes requests on, and records the tokens of each chat completion in order."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.turns: list[TurnTokens] = []
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(await request.aread()) | {"return_token_ids": True}
        headers = httpx.Headers(request.headers)
        del headers["content-length"]
        response = await self._inner.handle_async_request(
            httpx.Request(
                request.method,
                request.url,
                headers=headers,
                json=asked,
                extensions=request.extensions,
            )
        )
        await response.aread()
        if response.is_success:
            body = response.json()
            prompt, completion = body["prompt_token_ids"], body["choices"][0]["token_ids"]
            self.turns.append(TurnTokens(tuple(prompt), tuple(completion)))
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class AuditedEnv:
    """Wraps the agent's `TreeEnv`, and adds the result of the comparison to the rollout's metrics.

    ``sent``: the tokens that the agent's client received, turn by turn.
    """

    def __init__(self, env: TreeEnv, sent: list[TurnTokens]) -> None:
        self._env = env
        self._sent = sent
        self._turns: TurnTree | None = None

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return self._env.messages if isinstance(self._env, AgentEnv) else ()

    async def run(self, turns: TurnTree) -> Terminal:
        self._turns = turns
        return self._with_result(await self._env.run(turns))

    async def finish(self, status: RolloutStatus) -> Terminal:
        return self._with_result(await self._env.finish(status))

    async def close(self) -> None:
        await self._env.close()

    def _with_result(self, terminal: Terminal) -> Terminal:
        turns = () if self._turns is None else self._turns.turns
        recorded = [
            TurnTokens(turn.prompt_token_ids, turn.completion.token_ids)
            for turn in turns
            if turn.is_seen
        ]
        metrics = {
            "agent/compared_turns": float(len(recorded)),
            "agent/token_mismatches": float(count_mismatches(recorded, self._sent)),
        }
        return replace(terminal, metrics={**terminal.metrics, **metrics})


def count_mismatches(recorded: list[TurnTokens], sent: list[TurnTokens]) -> int:
    """Count the turns that differ in any token, or that only one side has."""
    return sum(one != other for one, other in zip_longest(recorded, sent))
