"""The stories that word problems are made of: data only.

In ``text``, ``name`` and ``other`` are people, ``things`` is what is counted, and ``a``, ``b``,
``c`` are numbers; ``expression`` is what solves it.
"""

from __future__ import annotations

from typing import NamedTuple

NAMES: tuple[str, ...] = (
    "Adam", "Alice", "Boris", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Irene",
    "Jonas", "Kim", "Laura", "Milan", "Nina", "Oscar", "Paula", "Ruth", "Simon", "Vera",
)  # fmt: skip

THINGS: tuple[str, ...] = (
    "apples", "balls", "books", "cards", "coins", "cookies", "flowers", "marbles",
    "pears", "pencils", "shells", "stamps", "stickers", "stones", "tickets", "toys",
)  # fmt: skip


class Story(NamedTuple):
    text: str
    expression: str


ONE_OPERATION: tuple[Story, ...] = (
    Story("{name} has {a} {things}. {other} brings {b} more. How many are there now?", "{a}+{b}"),
    Story("{name} and {other} find {a} and {b} {things}. How many is that together?", "{a}+{b}"),
    Story("{name} has {a} {things} and gives {b} to {other}. How many are left?", "{a}-{b}"),
    Story("{name} loses {b} of {a} {things}. How many are left?", "{a}-{b}"),
    Story("{name} buys {a} boxes with {b} {things} each. How many is that together?", "{a}*{b}"),
    Story("{a} friends have {b} {things} each. How many is that together?", "{a}*{b}"),
    Story("{name} shares {a} {things} among {b} friends. How many does each get?", "{a}/{b}"),
    Story("{name} packs {a} {things} into {b} boxes. How many are in each?", "{a}/{b}"),
)

TWO_OPERATIONS: tuple[Story, ...] = (
    Story(
        "{name} has {a} {things}, finds {b} more and gives {c} to {other}. How many are left?",
        "{a}+{b}-{c}",
    ),
    Story(
        "{name} has {a} {things} and buys {b} boxes with {c} each. How many are there now?",
        "{a}+{b}*{c}",
    ),
    Story(
        "{name} buys {a} boxes with {b} {things} each and loses {c}. How many are left?",
        "{a}*{b}-{c}",
    ),
    Story(
        "Each day {name} finds {a} {things} and {other} finds {b}. How many after {c} days?",
        "({a}+{b})*{c}",
    ),
    Story(
        "{name} and {other} share {a} and {b} {things} among {c} friends. How many does each get?",
        "({a}+{b})/{c}",
    ),
    Story(
        "{name} has {a} {things}, loses {b} and packs the others into {c} boxes. "
        "How many are in each?",
        "({a}-{b})/{c}",
    ),
)
