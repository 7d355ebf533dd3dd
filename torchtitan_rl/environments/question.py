"""The environment of a question with one answer: a prompt, a completion, a score."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from torchtitan_rl.environments.checkers import CheckFailedError, CheckTimeoutError
from torchtitan_rl.rollout.chatml import Message
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.message_env import MessageObservation
from torchtitan_rl.types import RolloutStatus

ScoreFunction = Callable[[str], Awaitable[float]]
"""The reward of an answer; the text is without the policy's reasoning."""


class QuestionEnv:
    """A `MessageEnv` of one turn.

    A score that is not found in time is 0, and counted by the metric ``check_timeouts``; so is that
    of a `CheckFailedError`, by ``check_errors``. ``metrics`` are reported with each rollout.
    """

    replays = True  # it depends only on the problem and the completion

    def __init__(
        self,
        messages: Sequence[Message],
        score: ScoreFunction,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self._messages = messages
        self._score = score
        self._metrics = metrics or {}

    async def reset(self) -> MessageObservation:
        return MessageObservation(messages=self._messages)

    async def step(self, message: Mapping[str, Any]) -> Terminal:
        reward, failed = 0.0, ""
        try:
            reward = await self._score(message.get("content") or "")
        except CheckTimeoutError:
            failed = "check_timeouts"
        except CheckFailedError:
            failed = "check_errors"
        counts = {name: float(name == failed) for name in ("check_timeouts", "check_errors")}
        return Terminal(reward=reward, metrics={**self._metrics, **counts})

    async def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=0.0, metrics=self._metrics)

    async def close(self) -> None:
        """There is nothing to release."""


def as_messages(system: str, user: str) -> list[Message]:
    """A system message, where there is one, and the user's."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": user}]
