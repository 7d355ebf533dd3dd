"""Conversations to imitate: right ones, and ones with mistakes of four kinds.

A policy trained on random mistakes rarely does what is right but can: reinforcement learning has
something to improve and quickly succeeds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl import Episode
from torchtitan_rl.experiments import tiny_policy
from torchtitan_rl.experiments.calculator_agent.agent import CALCULATOR, SYSTEM_PROMPT
from torchtitan_rl.experiments.calculator_agent.calculator import (
    CalculatorError,
    as_text,
    calculate,
)
from torchtitan_rl.experiments.calculator_agent.tokenizer import answer_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Probabilities: to guess the answer without a call; to change an operation, or a digit, of
    the expression; to change a digit of the result in the answer. Below 0.5 each, what is right
    stays the likeliest."""

    guess: float = 0.0
    operation: float = 0.0
    digit: float = 0.0
    report: float = 0.0


def demonstration(
    problem: Mapping[str, Any],
    *,
    mistakes: Mistakes,
    rng: random.Random,
    tokenizer: Any,
    name: str,
) -> Episode:
    """A conversation about the problem, as `imitated`."""
    return imitated(conversation(problem, mistakes, rng=rng), tokenizer=tokenizer, name=name)


def imitated(
    messages: list[dict[str, Any]],
    *,
    tokenizer: Any,
    name: str,
    tools: Sequence[Mapping[str, Any]] = (CALCULATOR,),
) -> Episode:
    """The conversation as one episode, with loss on the assistant's messages and their ends."""
    token_ids: tuple[int, ...] = ()
    mask: list[bool] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, spoken = rendered(messages[: place + 1], tokenizer, tools)
        if prompt[: len(token_ids)] != token_ids:
            raise ValueError(f"{name}: message {place} does not extend the conversation")
        token_ids = prompt + spoken
        mask += [False] * (len(prompt) - len(mask)) + [True] * len(spoken)
    return tiny_policy.imitated(name, token_ids, mask)


def rendered(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (CALCULATOR,),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before the last message (the assistant's), and those of that message."""
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    spoken = whole.removeprefix(prompt).removesuffix("\n")

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    return encode(prompt), encode(spoken)


def conversation(
    problem: Mapping[str, Any], mistakes: Mistakes, *, rng: random.Random
) -> list[dict[str, Any]]:
    """The messages of a solution; each mistake is drawn independently."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem["text"]},
    ]
    if rng.random() < mistakes.guess:
        return [*messages, _answer(str(rng.randrange(2, 2 * problem["answer"] + 2)))]
    expression = with_mistakes(problem["expression"], mistakes, rng=rng)
    result = shown_result(expression)
    call = {"name": "calculator", "arguments": {"expression": expression}}
    messages += [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": result},
    ]
    if rng.random() < mistakes.report:
        result = with_other_digit(result, rng=rng)
    return [*messages, _answer(result)]


def with_mistakes(expression: str, mistakes: Mistakes, *, rng: random.Random) -> str:
    """The expression with mistakes; it may have no value."""
    if rng.random() < mistakes.operation:
        expression = _with_other_sign(expression, "+-*/", rng)
    if rng.random() < mistakes.digit:
        expression = _with_other_sign(expression, "123456789", rng)
    return expression


def with_other_digit(number: str, *, rng: random.Random) -> str:
    return _with_other_sign(number, "0123456789", rng)


def _answer(number: str) -> dict[str, Any]:
    return {"role": "assistant", "content": answer_text(number)}


def shown_result(expression: str) -> str:
    """What the calculator replies."""
    try:
        return as_text(calculate(expression))
    except CalculatorError as error:
        return f"error: {error}"


def _with_other_sign(text: str, signs: str, rng: random.Random) -> str:
    """The text with one of its ``signs`` replaced by another of them."""
    places = [place for place, sign in enumerate(text) if sign in signs]
    if not places:
        return text
    place = rng.choice(places)
    other = rng.choice([sign for sign in signs if sign != text[place]])
    return text[:place] + other + text[place + 1 :]
