"""The environment of one question: calls of the tool are answered, a message without one ends it.

The reward is 1 if the last word of that message is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchtitan_rl import MessageObservation, RolloutStatus, Terminal
from torchtitan_rl.experiments.search.index import NOTHING, SEARCH

Search = Callable[[str], list[str]]
"""The documents that a query finds."""


class SearchEnv:
    """A `MessageEnv`."""

    replays = True  # it depends only on the problem and the completions

    def __init__(self, question: str, answer: str, search: Search) -> None:
        self._question = question
        self._answer = answer
        self._search = search
        self._num_searches = 0
        self._num_invalid = 0

    async def reset(self) -> MessageObservation:
        question = {"role": "user", "content": self._question}
        return MessageObservation(messages=[question], tools=[SEARCH])

    async def step(self, message: Mapping[str, Any]) -> MessageObservation | Terminal:
        calls = message.get("tool_calls", ())
        invalid = message.get("invalid_tool_calls", ())
        if not calls and not invalid:
            return self._terminal(is_right(message.get("content") or "", self._answer))
        replies = [self._reply(call["function"]) for call in calls]
        replies += [self._refusal("not a call in JSON") for _ in invalid]
        return MessageObservation(messages=[{"role": "tool", "content": text} for text in replies])

    async def finish(self, status: RolloutStatus) -> Terminal:
        return self._terminal(False)

    async def close(self) -> None:
        """There is nothing to release."""

    def _reply(self, call: Mapping[str, Any]) -> str:
        arguments = call["arguments"]
        query = arguments.get("query") if isinstance(arguments, Mapping) else None
        if call["name"] != SEARCH["function"]["name"]:
            return self._refusal(f"there is no tool {call['name']}")
        if not isinstance(query, str):
            return self._refusal("the arguments must be one query")
        self._num_searches += 1
        return "\n".join(self._search(query)) or NOTHING

    def _refusal(self, cause: str) -> str:
        self._num_invalid += 1
        return f"error: {cause}"

    def _terminal(self, is_right: bool) -> Terminal:
        metrics = {"searches": self._num_searches, "invalid_calls": self._num_invalid}
        return Terminal(reward=float(is_right), metrics=metrics)


def is_right(text: str, answer: str) -> bool:
    """Whether ``text`` ends with the answer.

    >>> is_right("It is known for its cheese.", "cheese")
    True
    """
    words = text.strip().rstrip(".").split()
    return bool(words) and words[-1] == answer
