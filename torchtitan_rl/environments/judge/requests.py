"""Requests to the judge's endpoint: limited, repeated where that may help, and counted.

Invariants: within any 60 seconds at most ``requests_per_minute`` requests begin. The client repeats
nothing by itself, so what is counted is what was sent.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.environments.judge.config import JudgeConfig
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.rollout.chatml import Message

_MAX_BACKOFF_S = 60.0
_REPEATED = (408, 409, 429)  # and all from 500


class JudgeError(TorchtitanRLError):
    """There is no score, and why."""


@dataclass(slots=True)
class Cost:
    """Of one score; ``last`` is what came of the newest attempt."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last: str = "it waited for its turn"

    def add(self, usage: Any) -> None:
        self.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
        self.completion_tokens += getattr(usage, "completion_tokens", None) or 0


class RateLimit:
    """Lets callers pass in their order; ``per_minute`` 0 lets all pass at once."""

    def __init__(self, per_minute: int) -> None:
        self._begun: deque[float] = deque(maxlen=per_minute)
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        if self._begun.maxlen == 0:
            return
        async with self._turn:
            loop = asyncio.get_running_loop()
            if len(self._begun) == self._begun.maxlen:
                await asyncio.sleep(self._begun[0] + 60.0 - loop.time())
            self._begun.append(loop.time())


class JudgeClient:
    """Asks one endpoint; all scores of a run share it, and its limits."""

    def __init__(self, config: JudgeConfig) -> None:
        from openai import AsyncOpenAI  # takes a second to import

        self._config = config
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            api_key=os.environ.get(config.api_key_env) or "none",
            timeout=config.request_timeout_s,
            max_retries=0,
        )
        self._free = asyncio.Semaphore(config.max_concurrent)
        self._limit = RateLimit(config.requests_per_minute)

    async def ask(
        self,
        messages: Sequence[Message],
        read: Callable[[str], Awaitable[float | None]],
        cost: Cost,
    ) -> float:
        """The first answer of which ``read`` makes a score.

        Raises:
            JudgeError: no attempt succeeded, or the endpoint refuses the request.
        """
        for attempt in range(self._config.attempts):
            async with self._free:
                await self._limit.wait()
                answer, retry_after_s = await self._attempt(messages, cost)
            if answer is not None:
                if (score := await read(answer)) is not None:
                    return score
                cost.last = f"its answer has no score: {answer[-200:]!r}"
            if attempt + 1 < self._config.attempts:
                await asyncio.sleep(max(retry_after_s, self._backoff_s(attempt)))
        raise JudgeError(f"{cost.requests} requests gave no score; the last: {cost.last}")

    async def close(self) -> None:
        await self._client.close()

    async def _attempt(self, messages: Sequence[Message], cost: Cost) -> tuple[str | None, float]:
        """The answer, or None and the seconds that the endpoint wants to be left alone."""
        from openai import APIConnectionError, APIStatusError, OpenAIError

        cost.requests += 1
        cost.last = "it waited for the endpoint"
        untyped: Any = messages
        try:
            response = await self._client.chat.completions.create(
                model=self._config.model, messages=untyped, extra_body=self._config.options
            )
        except APIConnectionError as error:
            cost.last = f"{type(error).__name__}: {error.__cause__ or error}"
            return None, 0.0
        except APIStatusError as error:
            cost.last = f"HTTP {error.status_code}: {error.message}"
            if error.status_code < 500 and error.status_code not in _REPEATED:
                raise JudgeError(cost.last) from error
            return None, _retry_after_s(error.response.headers.get("retry-after", ""))
        except (OpenAIError, ValueError) as error:  # an answer that is not of the API
            cost.last = f"{type(error).__name__}: {error}"
            return None, 0.0
        # The client does not check what the endpoint answers: every part may be missing.
        cost.add(getattr(response, "usage", None))
        choice = next(iter(getattr(response, "choices", None) or ()), None)
        return str(getattr(getattr(choice, "message", None), "content", None) or ""), 0.0

    def _backoff_s(self, attempt: int) -> float:
        longest = min(self._config.backoff_s * 2.0**attempt, _MAX_BACKOFF_S)
        return longest * random.uniform(0.5, 1.0)


def _retry_after_s(header: str) -> float:
    """Of seconds; a date is not kept."""
    try:
        return max(0.0, float(header))
    except ValueError:
        return 0.0
