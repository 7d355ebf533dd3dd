"""A question that is answered with tools: any number of calls, then the answer.

What goes wrong in a call is answered to the policy, and counted; only tools that are lost (a server
that died) end the rollout, with an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan_rl.aio import cancel_all, uninterrupted
from torchtitan_rl.environments.question import QuestionEnv, ScoreFunction
from torchtitan_rl.rollout.chatml import Message, is_plain_json
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.message_env import MessageObservation
from torchtitan_rl.types import RolloutStatus

_SHORT_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What the policy reads; ``failed`` for an error."""

    text: str
    failed: bool = False


class Tools(Protocol):
    """The tools of one rollout."""

    async def open(self) -> Sequence[Mapping[str, Any]]:
        """Get them ready. Returns their schemas, as in chat APIs: ``{"type": "function",
        "function": {"name": ..., "description": ..., "parameters": ...}}``."""
        ...

    async def call(self, name: str, arguments: dict[str, Any], /) -> ToolAnswer:
        """Calls of one message begin in their order and run at once. Tools of which one call
        changes what the next does hold an `asyncio.Lock`, which keeps the order.

        Raises:
            Exception: the tools are lost; the rollout fails.
        """
        ...

    async def close(self) -> None:
        """Called once, on every path, also during another call."""
        ...


class ToolEnv:
    """A `MessageEnv`: messages with calls are answered by the tools, one without is the answer.

    ``replays``: the tools give the same answers again, and change nothing outside of the rollout.
    ``shows_tools``: their schemas are put into the prompt, by the chat format.
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
        question = await self._question.reset()
        shown = schemas if self._shows_tools else ()
        return MessageObservation(messages=question.messages, tools=shown)

    async def step(self, message: Mapping[str, Any]) -> MessageObservation | Terminal:
        answers = await self._call_all(message.get("tool_calls", ()))
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

    async def _call_all(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolAnswer]:
        """Their answers, in the order of the calls."""
        tasks = [asyncio.create_task(self._call(call["function"])) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await uninterrupted(cancel_all(tasks))

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
        counts = {
            "tool_calls": float(self._num_calls),
            "failed_tool_calls": float(self._num_failed),
        }
        return Terminal(reward=end.reward, metrics={**end.metrics, **counts})
