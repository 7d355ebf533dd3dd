"""Conversations to imitate: right ones, and ones with mistakes of five kinds.

A program may leave out the last number, have a wrong digit, or call a function that there is not;
then the policy reads an error, and tries again or gives up. Answers may be guessed, or not be what
the program printed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_rl import Message

_MAX_CALLS = 3
_WRONG_NAMES = {"sum": "total", "max": "largest", "str": "text", "range": "numbers"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Probabilities. Below 0.5 each, what is right stays the likeliest."""

    guess: float = 0.0  # before a program, and after an error
    edge: float = 0.0
    digit: float = 0.0
    name: float = 0.0
    report: float = 0.0


def conversation(
    problem: Mapping[str, Any], mistakes: Mistakes, rng: random.Random
) -> list[tuple[list[Message], str]]:
    """The turns of a solution: the messages before an answer, and the answer."""
    turns: list[tuple[list[Message], str]] = []
    messages: list[Message] = [{"role": "user", "content": problem["question"]}]
    while rng.random() >= mistakes.guess and len(turns) < _MAX_CALLS:
        expression = with_mistakes(problem["expression"], mistakes, rng)
        turns.append((messages, call_text(expression)))
        printed = result_of(expression)
        messages = [{"role": "tool", "content": printed}]
        if printed.isdigit():
            if rng.random() < mistakes.report:
                printed = with_other_digit(printed, rng)
            return [*turns, (messages, answer_text(printed))]
    guess = str(rng.randrange(2 * int(problem["answer"]) + 2))
    return [*turns, (messages, answer_text(guess))]


def with_mistakes(expression: str, mistakes: Mistakes, rng: random.Random) -> str:
    """The expression with mistakes, each drawn independently."""
    if rng.random() < mistakes.edge:
        expression = expression.replace("+1)", ")")
    if rng.random() < mistakes.digit:
        expression = with_other_digit(expression, rng)
    names = [name for name in _WRONG_NAMES if f"{name}(" in expression]
    if names and rng.random() < mistakes.name:
        name = rng.choice(names)
        expression = expression.replace(f"{name}(", f"{_WRONG_NAMES[name]}(", 1)
    return expression


def with_other_digit(text: str, rng: random.Random) -> str:
    """One of the digits is another one, and none becomes 0."""
    place = rng.choice([found.start() for found in re.finditer(r"\d", text)])
    digit = rng.choice([digit for digit in "123456789" if digit != text[place]])
    return text[:place] + digit + text[place + 1 :]


def result_of(expression: str) -> str:
    """What the tool answers to the program that prints an expression of this module."""
    try:
        return str(eval(expression))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def call_text(expression: str) -> str:
    """A call of the tool as the policy writes it."""
    call = json.dumps({"name": "python", "arguments": {"code": f"print({expression})"}})
    return f"<tool_call>\n{call}\n</tool_call>"


def answer_text(number: str) -> str:
    return f"The answer is {number}."
