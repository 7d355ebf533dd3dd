"""Environments that work in chat messages, and the wrapper that makes them work in tokens.

The wrapper owns the conversation and nothing else: it parses completions into messages, hands
them to the environment, and renders what comes back as the next prompt, which extends the
previous prompt and completion wherever the renderer can prove that. It enforces no limit: turns,
tokens and times are limited in `rollouter.py`, for every kind of environment alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torchtitan_rl.rollout.calls import call, compute
from torchtitan_rl.rollout.env import Observation, Stateful, Terminal
from torchtitan_rl.rollout.rendering import ChatRenderer, Message, TokenIds
from torchtitan_rl.types import Completion, RolloutStatus

_SHORT_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageObservation:
    """What the environment adds to the conversation before the model's next turn.

    ``messages`` go behind the assistant's last message. ``replace_messages`` instead is a whole
    new conversation (history edited, summarized, cut): it is rendered afresh, and the rollout
    branches into another episode. ``tools`` are read from the first observation and from those
    that replace the conversation. ``turn_reward`` is for the assistant's message just stepped with.
    """

    messages: Sequence[Message] = ()
    replace_messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    turn_reward: float | None = None


class MessageEnv(Protocol):
    """One rollout's environment in chat messages. Used for one rollout and then closed.

    Each method may be ``async`` or plain; plain ones run in a worker thread and may block. To be
    continued by another process it is `Stateful`, or declares itself `Replayable` with ``replays``;
    that is never assumed, for the wrapper cannot know what `step` does to the world.
    """

    def reset(self) -> Any:
        """Returns the first `MessageObservation`: system and user messages, tools."""

    def step(self, message: dict[str, Any]) -> Any:
        """Takes the assistant's message; returns a `MessageObservation` or a `Terminal`."""

    def finish(self, status: RolloutStatus) -> Any:
        """Called once where a limit ended the rollout: returns the `Terminal` so far."""

    def close(self) -> Any:
        """Called exactly once, on every path."""


class MessageTokenEnv:
    """A `MessageEnv` as a `TokenEnv`, which can be continued wherever the `MessageEnv` can."""

    def __init__(self, env: MessageEnv, renderer: ChatRenderer) -> None:
        self._env = env
        self._renderer = renderer
        self._messages: list[Message] = []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._prompt: TokenIds = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far; after an edit, the edited one."""
        return tuple(self._messages)

    @property
    def replays(self) -> bool:
        return bool(getattr(self._env, "replays", False))

    async def state_dict(self) -> dict[str, Any] | None:
        """The conversation and the state of the `MessageEnv`; None where that has none."""
        state = await call(self._env.state_dict) if isinstance(self._env, Stateful) else None
        if state is None:
            return None
        return {
            "env": state,
            "messages": self._messages,
            "tools": list(self._tools),
            "prompt": self._prompt,
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises TypeError where the `MessageEnv` cannot be loaded any more."""
        if not isinstance(self._env, Stateful):
            raise TypeError(f"{type(self._env).__name__} has no load_state_dict")
        await call(self._env.load_state_dict, state["env"])
        self._messages = list(state["messages"])
        self._tools = list(state["tools"])
        self._prompt = tuple(state["prompt"])

    async def reset(self) -> Observation:
        observation: MessageObservation = await call(self._env.reset)
        self._restart(observation, observation.replace_messages or observation.messages)
        first: Observation = await self._compute(self._render, observation, None)
        return first

    async def step(self, completion: Completion) -> Observation | Terminal:
        message, text = await self._compute(self._parse, completion)
        self._messages.append(message)
        answer: MessageObservation | Terminal = await call(self._env.step, dict(message))
        if isinstance(answer, Terminal):
            return replace(answer, turn_text=text)
        if answer.replace_messages is not None:
            self._restart(answer, answer.replace_messages)
            completion_ids = None
        else:
            self._messages.extend(answer.messages)
            completion_ids = completion.token_ids
        observation: Observation = await self._compute(self._render, answer, completion_ids)
        return replace(observation, turn_text=text)

    async def finish(self, status: RolloutStatus) -> Terminal:
        terminal: Terminal = await call(self._env.finish, status)
        return terminal

    async def close(self) -> None:
        await call(self._env.close)

    async def _compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Off the event loop, but for short conversations: there the way costs more than the work,
        a fraction of a millisecond."""
        if sum(len(str(message.get("content"))) for message in self._messages) < _SHORT_CHARS:
            return function(*args)
        return await compute(function, *args)

    def _restart(self, observation: MessageObservation, messages: Sequence[Message]) -> None:
        self._messages = list(messages)
        self._tools = observation.tools or self._tools

    def _parse(self, completion: Completion) -> tuple[dict[str, Any], str]:
        message = self._renderer.parse(completion.token_ids, self._prompt)
        return message, self._renderer.decode(completion.token_ids)

    def _render(
        self, observation: MessageObservation, completion_ids: TokenIds | None
    ) -> Observation:
        """The next prompt; ``completion_ids`` None means that there is nothing to extend."""
        extended = None
        if completion_ids is not None:
            extended = self._renderer.extend(self._prompt, completion_ids, observation.messages)
        if extended is None:
            extended = self._renderer.initial_prompt(self._messages, self._tools)
        self._prompt = extended
        return Observation(
            prompt_token_ids=extended,
            max_tokens=observation.max_tokens,
            stop_token_ids=self._renderer.stop_token_ids,
            turn_reward=observation.turn_reward,
        )
