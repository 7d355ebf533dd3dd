"""Calls of a rollout's environment, each within its time limit; every failure is a `RolloutEnded`.

Answers are checked here, too: nothing of a wrong type gets behind this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from torchtitan_rl.rollout.abandoned import abandoned
from torchtitan_rl.rollout.answers import WrongAnswerError, checked_answer, checked_terminal
from torchtitan_rl.rollout.calls import CallTimeoutError, call, is_cancelled, summary, within
from torchtitan_rl.rollout.env import Observation, Terminal, TokenEnv
from torchtitan_rl.types import Completion, RolloutStatus

_A = TypeVar("_A")


class RolloutEnded(Exception):
    """The rollout is over without a `Terminal`."""

    def __init__(self, status: RolloutStatus, cause: str) -> None:
        super().__init__(cause)
        self.status = status
        self.cause = cause


class EnvCalls:
    """``on_call`` is told the name of each method before it is called."""

    def __init__(
        self, *, timeout_s: float, max_prompt_tokens: int, on_call: Callable[[str], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._max_prompt_tokens = max_prompt_tokens
        self._on_call = on_call

    async def __call__(self, method: Callable[..., Any], *args: Any) -> Any:
        """
        Raises:
            RolloutEnded: it failed, or took too long.
            HangingCallsError: too many calls hang; no rollout can go on.
        """
        abandoned.require_few()
        return await self._call(method, *args)

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        name = getattr(method, "__name__", repr(method))
        self._on_call(name)
        try:
            return await within(self._timeout_s, call, method, *args)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise RolloutEnded(RolloutStatus.ENV_ERROR, f"{name}: {summary(error)}") from error
        except CallTimeoutError as error:
            raise RolloutEnded(RolloutStatus.STEP_TIMEOUT, f"{name}: {error}") from error
        except (Exception, SystemExit) as error:
            raise RolloutEnded(RolloutStatus.ENV_ERROR, f"{name}: {summary(error)}") from error

    async def reset(self, env: TokenEnv) -> Observation:
        """The checked first observation."""
        answer = self._checked(await self(env.reset))
        if isinstance(answer, Terminal):
            cause = "the environment owes an Observation to begin with, not a Terminal"
            raise RolloutEnded(RolloutStatus.ENV_ERROR, cause)
        return answer

    async def step(self, env: TokenEnv, completion: Completion) -> Observation | Terminal:
        """The checked answer of ``step``."""
        return self._checked(await self(env.step, completion))

    async def finish(self, env: TokenEnv, status: RolloutStatus) -> Terminal:
        """The checked answer of ``finish``."""
        return self._check(checked_terminal, await self(env.finish, status))

    async def close(self, env: TokenEnv) -> str | None:
        """Close to the end (or its time-out), cancelled or not; returns what went wrong."""
        closing = asyncio.ensure_future(self._call(env.close))
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        failure = None if closing.cancelled() else closing.exception()
        return str(failure) if failure else None

    def _checked(self, answer: object) -> Observation | Terminal:
        return self._check(checked_answer, answer, self._max_prompt_tokens)

    def _check(self, check: Callable[..., _A], *args: Any) -> _A:
        try:
            return check(*args)
        except WrongAnswerError as error:
            raise RolloutEnded(RolloutStatus.ENV_ERROR, str(error)) from error
        except Exception as error:  # objects of the environment's, asked for their numbers
            raise RolloutEnded(RolloutStatus.ENV_ERROR, f"answer: {summary(error)}") from error
