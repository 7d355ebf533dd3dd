"""What an environment answered, checked and in our own types. Pure.

Environments are written by anybody: what goes on from here into requests, records and files has
the promised types, whatever they are (a numpy reward becomes a float), or the rollout ends.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from operator import index
from typing import Any

from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.types import RolloutStatus


class WrongAnswerError(Exception):
    """The message says what the environment owes, and what it gave."""


_brief = reprlib.Repr()  # short, and never raises
_brief.maxother = 200


def checked_answer(answer: object, max_prompt_tokens: int) -> Observation | Terminal:
    """The answer of `TokenEnv.reset` or `step`, with tuples and plain numbers.

    Of a prompt over ``max_prompt_tokens``, of which no turn will be made, one more is kept.

    Raises:
        WrongAnswerError: it is no such answer.
    """
    if isinstance(answer, Terminal):
        return checked_terminal(answer)
    if not isinstance(answer, Observation):
        raise _owes("an Observation or a Terminal", answer)
    return replace(
        answer,
        prompt_token_ids=_prompt(answer.prompt_token_ids, max_prompt_tokens),
        max_tokens=None if answer.max_tokens is None else _count("max_tokens", answer.max_tokens),
        stop_token_ids=_token_ids("stop_token_ids", answer.stop_token_ids),
        stop=_stop_strings(answer.stop),
        num_logprobs=_count("num_logprobs", answer.num_logprobs, least=0),
        turn_reward=_number("turn_reward", answer.turn_reward),
        turn_text=_text(answer.turn_text),
        turn_is_seen=bool(answer.turn_is_seen),
    )


def checked_terminal(answer: object) -> Terminal:
    """The answer of `TokenEnv.finish`. A reward that is not finite is left for the scoring.

    Raises:
        WrongAnswerError: it is no `Terminal`, or one of its fields has a wrong type.
    """
    if not isinstance(answer, Terminal):
        raise _owes("a Terminal", answer)
    if not isinstance(answer.status, RolloutStatus):
        raise _owes("a RolloutStatus as status", answer.status)
    if not isinstance(answer.metrics, Mapping):
        raise _owes("a mapping as metrics", answer.metrics)
    metrics = {str(key): _number(f"metrics[{key!r}]", v) for key, v in answer.metrics.items()}
    return replace(
        answer,
        reward=_number("reward", answer.reward),
        turn_reward=_number("turn_reward", answer.turn_reward),
        turn_text=_text(answer.turn_text),
        turn_is_seen=bool(answer.turn_is_seen),
        metrics={key: value for key, value in metrics.items() if value is not None},
    )


def _prompt(value: Any, max_prompt_tokens: int) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _owes("a sequence of token ids as prompt_token_ids", value)
    prompt = _token_ids("prompt_token_ids", islice(value, max_prompt_tokens + 1))
    if not prompt:
        raise _owes("an Observation with at least one token", value)
    return prompt


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    try:
        token_ids = tuple(index(token_id) for token_id in value)
    except TypeError as error:
        raise _owes(f"integers as {name}", value) from error
    if token_ids and min(token_ids) < 0:
        raise _owes(f"no negative token id in {name}", min(token_ids))
    return token_ids


def _count(name: str, value: Any, *, least: int = 1) -> int:
    try:
        count = index(value)
    except TypeError as error:
        raise _owes(f"an integer as {name}", value) from error
    if count < least:
        raise _owes(f"{name} of at least {least}", value)
    return count


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = () if isinstance(value, str) else tuple(value)
    if isinstance(value, str) or not all(isinstance(s, str) and s for s in strings):
        raise _owes("a tuple of texts that are not empty as stop", value)
    return strings


def _number(name: str, value: Any) -> float | None:
    """A float (a bool or an int likewise), None for None."""
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no number")
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _owes(f"a number as {name}", value) from error
    return number


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _owes("a text as turn_text", value)
    return value


def _owes(wanted: str, got: object) -> WrongAnswerError:
    return WrongAnswerError(f"the environment owes {wanted}, not {_brief.repr(got)}")
