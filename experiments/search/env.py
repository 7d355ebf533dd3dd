"""The tool ``search`` for one question, and the score of an answer: 1 if its last word is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan_rl import ToolAnswer
from torchtitan_rl.experiments.search.index import NOTHING, SEARCH


class SearchTools:
    """The `Tools` of a rollout; ``search`` finds the documents of a query."""

    def __init__(self, search: Callable[[str], list[str]]) -> None:
        self._search = search

    async def open(self) -> Sequence[Mapping[str, Any]]:
        return [SEARCH]

    async def call(self, name: str, arguments: Mapping[str, Any], /) -> ToolAnswer:
        query = arguments.get("query")
        if name != SEARCH["function"]["name"]:
            return ToolAnswer(text=f"error: there is no tool {name}", failed=True)
        if not isinstance(query, str):
            return ToolAnswer(text="error: the arguments must be one query", failed=True)
        return ToolAnswer(text="\n".join(self._search(query)) or NOTHING)

    async def close(self) -> None:
        """Releases nothing."""


async def score(text: str, *, answer: str) -> float:
    return float(is_right(text, answer))


def is_right(text: str, answer: str) -> bool:
    """Whether ``text`` ends with the answer.

    >>> is_right("It is known for its cheese.", "cheese")
    True
    """
    words = text.strip().rstrip(".").split()
    return bool(words) and words[-1] == answer
