"""The environment protocol: prompts as token ids out, sampled completions in.

An environment whose methods block (a subprocess, a simulator, a plain HTTP client) has the same
methods without ``async``, and is wrapped: ``threaded(BlockingEnv())``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torchtitan_rl.rollout.calls import in_thread
from torchtitan_rl.types import Completion, RolloutStatus

_Action = TypeVar("_Action", contravariant=True)
_Answer = TypeVar("_Answer", covariant=True)

_METHODS = ("reset", "step", "finish", "close")
_TREE_METHODS = ("run", "finish", "close")
_STATE_METHODS = ("state_dict", "load_state_dict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The whole prompt of the next turn: everything that the model sees, not only what is new.

    As long as it extends the previous prompt and completion, the rollout stays one episode.
    ``constraints`` are engine options that cut tokens (structured_outputs, allowed_token_ids,
    bad_words), which the loss takes into account. ``turn_reward`` and ``turn_text`` (see `Turn`)
    describe the completion that `TokenEnv.step` was called with; the reward is trained on with
    ``rollout.credit`` ``turn``.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int | None = None  # of the next completion; lowers the configured budget
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    num_logprobs: int = 0  # alternatives of each token to return with the next completion
    constraints: Mapping[str, Any] = field(default_factory=dict)
    turn_reward: float | None = None
    turn_text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The end of a rollout. ``reward`` None leaves the reward to the rubric."""

    reward: float | None = None
    status: RolloutStatus = RolloutStatus.COMPLETED
    turn_reward: float | None = None
    turn_text: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class TokenEnv(Protocol):
    """The environment of one rollout, in token ids. Each rollout gets a new instance.

    Methods are called one after another, on the event loop that all rollouts share: a method that
    blocks it stops them all, so wrap blocking environments with `threaded`. Only `close` may be
    called while another call, which took too long, still runs. An exception ends this rollout with
    ``RolloutStatus.ENV_ERROR`` and no other. A resumed run continues environments that are
    `Stateful` or `Replayable`, and starts the rollouts of all others again.

    This one asks for one token and rewards 7:

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
        """The first prompt."""
        ...

    async def step(self, completion: Completion, /) -> Observation | Terminal:
        """The next prompt, or the end."""
        ...

    async def finish(self, status: RolloutStatus, /) -> Terminal:
        """The reward so far. Called once if a limit (turns, tokens, time) ended the rollout; the
        ``status`` of the answer is ignored."""
        ...

    async def close(self) -> None:
        """Release what the environment holds. Called exactly once, on every path."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """An environment that can be saved between two turns and continued by another process.

    An environment that is also `Replayable` is restored from its state.
    """

    async def state_dict(self) -> Any:
        """JSON-able, or None if it cannot be saved now. Called after `reset` and each `step`."""
        ...

    async def load_state_dict(self, state: Any, /) -> None:
        """Called on a new environment instead of `reset`; `step` comes next."""
        ...


class Replayable(Protocol):
    """Declares that `reset` and `step` with the same completions rebuild the environment: it
    depends only on its problem and changes nothing outside of itself."""

    replays: bool  # usually a class attribute, True


@runtime_checkable
class Conversation(Protocol):
    """An environment that has chat messages; a JSON copy of them goes to ``Rollout.messages``."""

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]: ...


class BlockingEnv(Protocol[_Action, _Answer]):
    """The methods of a `TokenEnv` or a `MessageEnv`, plain instead of async; they may block.

    ``replays``, ``messages``, ``state_dict`` and ``load_state_dict`` (plain, too) are optional.
    """

    def reset(self) -> _Answer: ...

    def step(self, action: _Action, /) -> _Answer | Terminal: ...

    def finish(self, status: RolloutStatus, /) -> Terminal: ...

    def close(self) -> None: ...


def threaded(env: BlockingEnv[_Action, _Answer]) -> ThreadedEnv[_Action, _Answer]:
    """An environment with plain methods as one with async methods; each call gets a thread.

    It wraps a blocking `TokenEnv` (``threaded(MyEnv())``) or a blocking `MessageEnv`
    (``MessageTokenEnv(threaded(MyEnv()), renderer)``). Any number of environments may block at
    once. A call that exceeds its time limit cannot be stopped and keeps its thread.

    Raises:
        TypeError: a method is missing or already async.
    """
    return ThreadedEnv(env)


class ThreadedEnv(Generic[_Action, _Answer]):
    """What `threaded` returns."""

    def __init__(self, env: BlockingEnv[_Action, _Answer]) -> None:
        for name in _METHODS:
            method = getattr(env, name, None)
            if method is None:
                raise _missing(env, name, _METHODS)
            if not callable(method) or inspect.iscoroutinefunction(method):
                raise TypeError(
                    f"threaded({type(env).__name__}): {name} must be a plain method; give "
                    "environments with async methods as they are"
                )
        self._env = env
        self.wraps_stateful = is_stateful(env)

    async def reset(self) -> _Answer:
        answer: _Answer = await in_thread(self._env.reset)
        return answer

    async def step(self, action: _Action, /) -> _Answer | Terminal:
        answer: _Answer | Terminal = await in_thread(self._env.step, action)
        return answer

    async def finish(self, status: RolloutStatus, /) -> Terminal:
        terminal: Terminal = await in_thread(self._env.finish, status)
        return terminal

    async def close(self) -> None:
        await in_thread(self._env.close)

    @property
    def replays(self) -> bool:
        return bool(getattr(self._env, "replays", False))

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return self._env.messages if isinstance(self._env, Conversation) else ()

    async def state_dict(self) -> Any:
        """None if the environment has no state."""
        if not self.wraps_stateful:
            return None
        return await in_thread(require_stateful(self._env).state_dict)

    async def load_state_dict(self, state: Any, /) -> None:
        """
        Raises:
            TypeError: the environment cannot load a state.
        """
        await in_thread(require_stateful(self._env).load_state_dict, state)


def require_async(env: object) -> None:
    """
    Raises:
        TypeError: a method of the environment is missing or not async.
    """
    optional = [name for name in _STATE_METHODS if hasattr(env, name)]
    methods = _METHODS if hasattr(env, "step") or not hasattr(env, "run") else _TREE_METHODS
    for name in (*methods, *optional):
        if getattr(env, name, None) is None:
            raise _missing(env, name, methods)
        if not inspect.iscoroutinefunction(getattr(env, name, None)):
            raise TypeError(
                f"{type(env).__name__}.{name} must be an async method; wrap environments with "
                "plain methods in threaded(...)"
            )


def _missing(env: object, name: str, methods: Sequence[str]) -> TypeError:
    if env is None:
        return TypeError("expected an environment, got None; does Task.environment return one?")
    return TypeError(
        f"{type(env).__name__} has no {name}: an environment has the methods {', '.join(methods)}"
    )


def is_stateful(env: object) -> bool:
    """Whether it is `Stateful`; of a wrapper, whether what it wraps is."""
    return isinstance(env, Stateful) and getattr(env, "wraps_stateful", True)


def require_stateful(env: object) -> Stateful:
    """
    Raises:
        TypeError: the environment cannot load a state.
    """
    if not isinstance(env, Stateful):
        raise TypeError(f"{type(env).__name__} has no load_state_dict")
    return env
