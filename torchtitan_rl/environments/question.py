"""Environments for questions with one answer, given at once or after any number of tool calls. An
error in a call is returned to the policy and counted; the rollout fails if the tools are lost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torchtitan_rl.aio import cancel_all, uninterrupted
from torchtitan_rl.environments.scoring import CheckFailedError, CheckTimeoutError
from torchtitan_rl.rollout.chatml import Message, is_plain_json
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.message_env import MessageObservation
from torchtitan_rl.types import RolloutStatus

ScoreFunction = Callable[[str], Awaitable[float]]
"""Returns the reward of an answer; the text does not contain the policy's reasoning."""

_SHORT_CHARS = 200


class QuestionEnv:
    """A `MessageEnv` of one turn.

    If scoring takes too long or raises a `CheckFailedError`, the score is 0, and a metric,
    ``check_timeouts`` or ``check_errors``, counts it. ``metrics`` are reported with each rollout.
    """

    replays = True  # the environment depends only on the problem and the completion

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
        """Does nothing."""


def as_messages(system: str, user: str) -> list[Message]:
    """The user's message, preceded by a system message if ``system`` is not empty."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": user}]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """The text that the policy reads after a call; ``failed`` means that it is an error."""

    text: str
    failed: bool = False


class Tools(Protocol):
    """The tools of one rollout."""

    async def open(self) -> Sequence[Mapping[str, Any]]:
        """Prepare the tools, and return their schemas, as in chat APIs: ``{"type": "function",
        "function": {"name": ..., "description": ..., "parameters": ...}}``."""

    async def call(self, name: str, arguments: dict[str, Any], /) -> ToolAnswer:
        """Answer a call. The calls of one message begin in their order and run concurrently. Tools
        whose calls affect later calls should hold an `asyncio.Lock`, which keeps the order. Raises
        Exception: the tools are lost; the rollout fails."""

    async def close(self) -> None:
        """Release the tools. Called exactly once, even after an error, and maybe during a call."""


class ToolEnv:
    """A `MessageEnv`. After a message with tool calls, the policy gets their results; a message
    without a call is its final answer.

    ``replays``: repeated calls have the same results, and change nothing outside of the rollout.
    ``shows_tools``: the chat format puts the tools' schemas into the prompt.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Tools,
        score: ScoreFunction,
        *,
        replays: bool = False,
        shows_tools: bool = True,
    ) -> None:
        self._question = QuestionEnv(messages, score)
        self._tools = tools
        self._shows_tools = shows_tools
        self.replays = replays
        self._num_calls = self._num_failed = 0

    async def reset(self) -> MessageObservation:
        schemas = await self._tools.open()
        return replace(await self._question.reset(), tools=schemas if self._shows_tools else ())

    async def step(self, message: Mapping[str, Any]) -> MessageObservation | Terminal:
        calls = message.get("tool_calls", ())
        tasks = [asyncio.create_task(self._call(call["function"])) for call in calls]
        try:
            answers = await asyncio.gather(*tasks)  # in the order of the calls
        finally:
            await uninterrupted(cancel_all(tasks))
        for raw in message.get("invalid_tool_calls", ()):
            text = f"error: not a call with a name and arguments in JSON: {raw[:_SHORT_CHARS]}"
            answers.append(ToolAnswer(text=text, failed=True))
        if not answers:
            return self._with_counts(await self._question.step(message))
        self._num_calls += len(answers)
        self._num_failed += sum(answer.failed for answer in answers)
        return MessageObservation(
            messages=[{"role": "tool", "content": answer.text} for answer in answers]
        )

    async def finish(self, status: RolloutStatus) -> Terminal:
        return self._with_counts(await self._question.finish(status))

    async def close(self) -> None:
        await self._tools.close()

    async def _call(self, function: Mapping[str, Any]) -> ToolAnswer:
        arguments = function["arguments"]
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict) or not is_plain_json(arguments):
            return ToolAnswer(text="error: the arguments are not a JSON object", failed=True)
        return await self._tools.call(function["name"], arguments)

    def _with_counts(self, end: Terminal) -> Terminal:
        counts = {"tool_calls": self._num_calls, "failed_tool_calls": self._num_failed}
        return replace(end, metrics={**end.metrics, **counts})
