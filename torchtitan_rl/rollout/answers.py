"""Checks of what an environment returned, and its conversion to plain Python types. Pure.

What requests, records and files are made of has the declared types: a numpy reward becomes a float.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from operator import index
from typing import Any

from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.types import CONSTRAINTS, RolloutStatus


class WrongAnswerError(Exception):
    """The message says what was expected and what the environment returned."""


_brief = reprlib.Repr()  # short, and never raises
_brief.maxother = 200


def checked_answer(answer: object, max_prompt_tokens: int) -> Observation | Terminal:
    """The answer of `TokenEnv.reset` or `step`, with tuples and plain numbers.

    A prompt longer than ``max_prompt_tokens``, which gets no turn, is cut one token above that.

    Raises:
        WrongAnswerError: it is neither, or one of its fields has a wrong type.
    """
    if isinstance(answer, Terminal):
        return checked_terminal(answer)
    if not isinstance(answer, Observation):
        raise wrong_answer("an Observation or a Terminal", answer)
    return replace(
        answer,
        prompt_token_ids=_prompt(answer.prompt_token_ids, max_prompt_tokens),
        max_tokens=None if answer.max_tokens is None else _count("max_tokens", answer.max_tokens),
        stop_token_ids=_token_ids("stop_token_ids", answer.stop_token_ids),
        stop=_stop_strings(answer.stop),
        num_logprobs=_count("num_logprobs", answer.num_logprobs, least=0),
        constraints=_constraints(answer.constraints),
        **_turn_fields(answer),
    )


def checked_terminal(answer: object) -> Terminal:
    """The answer of `TokenEnv.finish`. Whether the reward is finite is checked when scoring.

    Raises:
        WrongAnswerError: it is not a `Terminal`, or one of its fields has a wrong type.
    """
    if not isinstance(answer, Terminal):
        raise wrong_answer("a Terminal", answer)
    if not isinstance(answer.status, RolloutStatus):
        raise wrong_answer("a RolloutStatus as status", answer.status)
    if not isinstance(answer.metrics, Mapping):
        raise wrong_answer("a mapping as metrics", answer.metrics)
    metrics = {str(key): _number(f"metrics[{key!r}]", v) for key, v in answer.metrics.items()}
    return replace(
        answer,
        reward=_number("reward", answer.reward),
        metrics={key: value for key, value in metrics.items() if value is not None},
        **_turn_fields(answer),
    )


def _turn_fields(answer: Observation | Terminal) -> dict[str, Any]:
    text: object = answer.turn_text
    if text is not None and not isinstance(text, str):
        raise wrong_answer("a string as turn_text", text)
    return {
        "turn_reward": _number("turn_reward", answer.turn_reward),
        "turn_text": text,
    }


def _prompt(value: Any, max_prompt_tokens: int) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise wrong_answer("a sequence of token ids as prompt_token_ids", value)
    prompt = _token_ids("prompt_token_ids", islice(value, max_prompt_tokens + 1))
    if not prompt:
        raise wrong_answer("at least one token in prompt_token_ids", value)
    return prompt


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    try:
        token_ids = tuple(index(token_id) for token_id in value)
    except TypeError as error:
        raise wrong_answer(f"integers as {name}", value) from error
    if token_ids and min(token_ids) < 0:
        raise wrong_answer(f"no negative token id in {name}", min(token_ids))
    return token_ids


def _count(name: str, value: Any, *, least: int = 1) -> int:
    try:
        count = index(value)
    except TypeError as error:
        raise wrong_answer(f"an integer as {name}", value) from error
    if count < least:
        raise wrong_answer(f"{name} of at least {least}", value)
    return count


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = () if isinstance(value, str) else tuple(value)
    if isinstance(value, str) or not all(isinstance(s, str) and s for s in strings):
        raise wrong_answer("a tuple of non-empty strings as stop", value)
    return strings


def _constraints(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not CONSTRAINTS.issuperset(value):
        raise wrong_answer(f"a mapping with names of {sorted(CONSTRAINTS)} as constraints", value)
    return value


def _number(name: str, value: Any) -> float | None:
    """A float (a bool or an int becomes one), None for None."""
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is not a number")
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong_answer(f"a number as {name}", value) from error


def wrong_answer(expected: str, got: object) -> WrongAnswerError:
    is_whole = "Observation" in expected or expected == "a Terminal"
    hint = "; does every path through it return one?" if got is None and is_whole else ""
    if type(got).__name__ == "MessageObservation" and is_whole:
        hint = "; a MessageEnv is wrapped: MessageTokenEnv(MyEnv(), make_renderer(tokenizer))"
    return WrongAnswerError(f"expected {expected}, got {_brief.repr(got)}{hint}")
