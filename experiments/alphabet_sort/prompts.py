"""What the user says in each turn. Words only; small models of every kind must understand it."""

from __future__ import annotations

from collections.abc import Sequence

_INSTRUCTION = (
    "Sort the names alphabetically, one per line, and write nothing else.\n"
    "When more names come, answer with the whole sorted list "
    "and write // new after each name that just came."
)
_MORE = "More names:"


def user_message(turns: Sequence[Sequence[str]], turn: int) -> str:
    """The user's message of ``turn`` (from 0): the rules first, then only the further names."""
    return "\n".join([_INSTRUCTION if turn == 0 else _MORE, *turns[turn]])
