"""The environment that a rollout talks to: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torchtitan_rl.types import Completion, RolloutStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The next turn's whole prompt: everything the model is to see, not only what is new.

    As long as it extends the previous prompt and completion, the rollout stays one episode.
    ``turn_reward``, ``turn_text`` and ``turn_is_seen`` (see `Turn`) describe the completion that
    was just stepped with.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int | None = None  # for the next completion, below the configured budget
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    num_logprobs: int = 0  # alternatives of each token that the environment wants to know
    turn_reward: float | None = None
    turn_text: str | None = None
    turn_is_seen: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The end of a rollout. ``reward`` None leaves it to the rubric."""

    reward: float | None = None
    status: RolloutStatus = RolloutStatus.COMPLETED
    turn_reward: float | None = None
    turn_text: str | None = None
    turn_is_seen: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)


class TokenEnv(Protocol):
    """One rollout's environment. An instance is used for one rollout and then closed.

    Each method may be ``async`` or plain; plain ones run in a worker thread and may block.
    An exception ends this rollout with ``RolloutStatus.ENV_ERROR``, and nothing else. Methods are
    called one after another; only `close` may come while a call that took too long still runs.
    A run that is resumed continues an environment that is `Stateful` or `Replayable`, too.
    """

    def reset(self) -> Any:
        """Returns the first `Observation` (or an awaitable of it)."""

    def step(self, completion: Completion) -> Any:
        """Returns the next `Observation`, or a `Terminal` (or an awaitable of either)."""

    def finish(self, status: RolloutStatus) -> Any:
        """Called once where a limit ended the rollout, not the environment: returns the `Terminal`
        with what it is worth so far (or an awaitable of it). Its own ``status`` is not read."""

    def close(self) -> Any:
        """Called exactly once, on every path."""


@runtime_checkable
class Stateful(Protocol):
    """An environment that can be saved between two turns, and continued by another process.

    Either method may be ``async`` or plain. State wins over replaying where there are both.
    """

    def state_dict(self) -> Any:
        """JSON-able, or None where it cannot be saved now. Called after `reset` and each `step`."""

    def load_state_dict(self, state: Any) -> Any:
        """Called on a fresh environment, instead of `reset`; `step` comes next."""


class Replayable(Protocol):
    """Declares that `reset` and stepping through the same completions rebuild the environment:
    it depends on its problem alone, and changes nothing outside of itself."""

    replays: bool  # usually a class attribute, True


@runtime_checkable
class Conversation(Protocol):
    """An environment that can show its conversation; it goes into ``Rollout.messages``, as a copy
    in JSON's types."""

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]: ...
