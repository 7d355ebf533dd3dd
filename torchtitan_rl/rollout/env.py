"""The environment protocol: an environment returns prompts as token ids, and gets sampled
completions. Its values are checked and converted to plain Python types: a numpy reward becomes a
float.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from typing import Any, Protocol, TypeVar, runtime_checkable

from torchtitan_rl.images import PromptImage
from torchtitan_rl.rollout.calls import in_thread
from torchtitan_rl.types import CONSTRAINTS, Completion, RolloutStatus

_S = TypeVar("_S", str, tuple[int, ...])
_T = TypeVar("_T")

_METHODS = ("reset", "step", "finish", "close")
_TREE_METHODS = ("run", "finish", "close")
_STATE_METHODS = ("state_dict", "load_state_dict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The whole prompt of the next turn: everything that the model sees, not only the new part.

    The rollout stays one episode as long as each prompt extends the previous prompt and completion.
    ``constraints`` are engine options that exclude tokens (structured_outputs, allowed_token_ids,
    bad_words), which the loss takes into account. ``turn_reward`` and ``turn_text`` (see `Turn`)
    describe the completion that `TokenEnv.step` was called with. ``images`` are those of the whole
    prompt, in the order of their tokens.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int | None = None  # of the next completion, at most the configured budget
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    num_logprobs: int = 0  # alternatives to return for each token of the next completion
    constraints: Mapping[str, Any] = field(default_factory=dict)
    turn_reward: float | None = None
    turn_text: str | None = None
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The end of a rollout. With ``reward`` None the rubric computes the reward."""

    reward: float | None = None
    status: RolloutStatus = RolloutStatus.COMPLETED
    turn_reward: float | None = None
    turn_text: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class TokenEnv(Protocol):
    """The environment of one rollout, in token ids. Each rollout gets a new instance.

    Methods are called one after another, on the event loop that all rollouts share, which a
    blocking method would stop: see `threaded`. Only `close` may be called while another call still
    runs, because that exceeded its time limit. An exception ends only this rollout, with
    ``RolloutStatus.ENV_ERROR``.

    Two attributes are optional. ``messages`` is the conversation, for ``Rollout.messages``.
    ``replays = True`` declares that `reset` and `step` with the same completions rebuild the
    environment: it depends only on its problem and changes nothing outside itself. A resumed run
    continues environments that replay or are `Stateful`, and starts all others again.

    This environment asks for one token and rewards token 7:

    >>> import asyncio
    >>> class LuckyEnv:
    ...     async def reset(self) -> Observation:
    ...         return Observation(prompt_token_ids=(1, 2), max_tokens=1)
    ...
    ...     async def step(self, completion: Completion) -> Observation | Terminal:
    ...         return Terminal(reward=float(completion.token_ids == (7,)))
    ...
    ...     async def finish(self, status: RolloutStatus) -> Terminal:
    ...         return Terminal(reward=0.0)
    ...
    ...     async def close(self) -> None: ...
    >>> asyncio.run(LuckyEnv().reset()).prompt_token_ids
    (1, 2)
    """

    async def reset(self) -> Observation:
        """Return the first prompt."""

    async def step(self, completion: Completion, /) -> Observation | Terminal:
        """Return the next prompt, or the end of the rollout."""

    async def finish(self, status: RolloutStatus, /) -> Terminal:
        """Return the reward so far. Called once if a limit (turns, tokens, time) ended the rollout.
        The ``status`` of the returned `Terminal` is ignored."""

    async def close(self) -> None:
        """Release the environment's resources. Called exactly once, on every path."""


@runtime_checkable
class Stateful(Protocol):
    """An environment that can be saved between two turns and continued by another process.

    If an environment is `Stateful` and also replays, it is restored from its state.
    """

    async def state_dict(self) -> Any:
        """Return the state as JSON-compatible values, or None if it cannot be saved now. Called
        after `reset` and each `step`."""

    async def load_state_dict(self, state: Any, /) -> None:
        """Restore the state. Called on a new environment instead of `reset`; `step` is called
        next."""


def threaded(env: Any) -> Any:
    """Make an environment with async methods from one whose methods block; each call gets a thread.

    For a `TokenEnv` (``threaded(MyEnv())``) or a `MessageEnv`
    (``MessageTokenEnv(threaded(MyEnv()), renderer)``). Any number may block at once. A call that
    exceeds its time limit cannot be stopped and keeps its thread.

    Raises:
        TypeError: a method is missing or already async.
    """
    for name in _METHODS:
        method = getattr(env, name, None)
        if method is None:
            raise _missing(env, name, _METHODS)
        if not callable(method) or inspect.iscoroutinefunction(method):
            where = f"threaded({type(env).__name__}): {name}"
            raise TypeError(f"{where} must be a plain method; give async ones as they are")
    return _ThreadedEnv(env)


class _ThreadedEnv:
    def __init__(self, env: Any) -> None:
        self.wrapped_env = env

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.wrapped_env, name)
        if name not in (*_METHODS, *_STATE_METHODS):
            return value

        async def call(*args: Any) -> Any:
            return await in_thread(value, *args)

        return call


def require_async(env: object) -> None:
    """Raise TypeError if a method of the environment is missing or not async."""
    optional = [name for name in _STATE_METHODS if hasattr(env, name)]
    methods = _METHODS if hasattr(env, "step") or not hasattr(env, "run") else _TREE_METHODS
    for name in (*methods, *optional):
        if getattr(env, name, None) is None:
            raise _missing(env, name, methods)
        if not inspect.iscoroutinefunction(getattr(env, name, None)):
            where = f"{type(env).__name__}.{name}"
            raise TypeError(f"{where} must be an async method; wrap plain ones in threaded(...)")


def _missing(env: object, name: str, methods: Sequence[str]) -> TypeError:
    if env is None:
        return TypeError("expected an environment, got None; does Task.environment return one?")
    return TypeError(
        f"{type(env).__name__} has no {name}: an environment has the methods {', '.join(methods)}"
    )


def is_stateful(env: object) -> bool:
    """Whether the environment, or the one inside a wrapper, can be saved."""
    inner = _innermost(env)  # `isinstance` with a protocol takes 8 us
    return all(getattr(inner, name, None) is not None for name in _STATE_METHODS)


def replays(env: object) -> bool:
    """Whether the environment, or the one inside a wrapper, declares that it can be replayed."""
    return bool(getattr(_innermost(env), "replays", False))


def _innermost(env: object) -> object:
    while (inner := getattr(env, "wrapped_env", None)) is not None:
        env = inner
    return env


class WrongAnswerError(Exception):
    """An environment returned a wrong value; the message has it and the expected type."""


_brief = reprlib.Repr()  # short, and never raises
_brief.maxother = 200


def checked_answer(answer: object, max_prompt_tokens: int) -> Observation | Terminal:
    """Check the answer of `TokenEnv.reset` or `step`, and convert it to tuples and plain numbers. A
    prompt is cut after ``max_prompt_tokens`` + 1 tokens, with which it is too long for a turn.

    Raises:
        WrongAnswerError: the answer is neither an Observation nor a Terminal, or a field has a
            wrong type.
        Exception: a user's object raised it when it was converted.
    """
    if isinstance(answer, Terminal):
        return checked_terminal(answer)
    if not isinstance(answer, Observation):
        raise wrong_answer("an Observation or a Terminal", answer)

    def prompt(value: Any) -> tuple[int, ...]:
        if isinstance(value, str):
            raise TypeError
        size = max_prompt_tokens + 1
        return _not_empty(_token_ids(value[:size] if type(value) is tuple else islice(value, size)))

    checks = {"prompt_token_ids": ("a sequence of token ids, at least one,", prompt)}
    return replace(answer, **_converted(answer, {**checks, **_OBSERVATION}))


def checked_terminal(answer: object) -> Terminal:
    """Check the answer of `TokenEnv.finish`; raises as `checked_answer` does. Scoring checks later
    that the reward is finite."""
    if not isinstance(answer, Terminal):
        raise wrong_answer("a Terminal", answer)
    return replace(answer, **_converted(answer, _TERMINAL))


def _converted(
    answer: object, checks: Mapping[str, tuple[str, Callable[[Any], Any]]]
) -> dict[str, Any]:
    fields = {}
    for name, (expected, convert) in checks.items():
        value = getattr(answer, name)
        try:
            fields[name] = convert(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise wrong_answer(f"{expected} as {name}", value) from error
    return fields


def _integer(value: Any, least: int = 0) -> int:
    if (number := index(value)) < least:
        raise ValueError
    return number


def _not_empty(value: _S) -> _S:
    if not value:
        raise ValueError
    return value


def _token_ids(value: Iterable[Any]) -> tuple[int, ...]:
    if type(value) is tuple and {*map(type, value)} == {int} and min(value) >= 0:
        return value  # the usual prompt, whatever its length, is checked without Python code
    return tuple(_integer(token_id) for token_id in value)


def _strings(value: Iterable[Any]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError
    return tuple(_not_empty(_text(one)) for one in value)


def _instance(kind: type[_T]) -> Callable[[Any], _T]:
    def check(value: Any) -> _T:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return check


_text = _instance(str)


def _constraints(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not CONSTRAINTS.issuperset(value):
        raise TypeError
    return value


def _images(value: Iterable[Any]) -> tuple[PromptImage, ...]:
    images = tuple(value)
    if not all(isinstance(one, PromptImage) for one in images):
        raise TypeError
    return images


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError
    return float(value)


def _metrics(value: Mapping[Any, Any]) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {str(name): _number(one) for name, one in value.items() if one is not None}


def _or_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


_TURN = {
    "turn_reward": ("a number", _or_none(_number)),
    "turn_text": ("a string", _or_none(_text)),
}
_OBSERVATION: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "max_tokens": ("an integer above 0", _or_none(lambda value: _integer(value, 1))),
    "stop_token_ids": ("token ids", _token_ids),
    "stop": ("a tuple of non-empty strings", _strings),
    "num_logprobs": ("an integer from 0 on", _integer),
    "images": ("a sequence of PromptImage", _images),
    "constraints": (f"a mapping with names of {sorted(CONSTRAINTS)}", _constraints),
    **_TURN,
}
_TERMINAL: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "reward": ("a number", _or_none(_number)),
    "status": ("a RolloutStatus", _instance(RolloutStatus)),
    "metrics": ("a mapping from names to numbers", _metrics),
    **_TURN,
}


def wrong_answer(expected: str, got: object) -> WrongAnswerError:
    is_whole = "Observation" in expected or expected == "a Terminal"
    hint = "; does every path through it return one?" if got is None and is_whole else ""
    if type(got).__name__ == "MessageObservation" and is_whole:
        hint = "; a MessageEnv is wrapped: MessageTokenEnv(MyEnv(), make_renderer(tokenizer))"
    return WrongAnswerError(f"expected {expected}, got {_brief.repr(got)}{hint}")
