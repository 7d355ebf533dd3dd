"""Games in chat messages: observations become text, answers become actions, rewards add up.

A `Game` is what is played (a gymnasium environment, an OpenEnv server, code of your own); `GameEnv`
plays it in messages. An answer that is no action is answered with the reason, takes no step of the
game, and is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torchtitan_rl.data.columns import fill
from torchtitan_rl.data.rows import Row
from torchtitan_rl.environments.checkers import CheckTimeoutError
from torchtitan_rl.environments.question import as_messages
from torchtitan_rl.environments.scoring import extract
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.message_env import MessageObservation
from torchtitan_rl.types import RolloutStatus

INVALID_ACTIONS = "invalid_actions"  # a metric; `torchtitan-rl env check` reads it, too
Total = Literal["sum", "last", "discounted"]


class InvalidActionError(Exception):
    """An answer is no action; the message tells the policy why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What came of an action. ``fields`` are for the templates: ``observation`` and others."""

    fields: Mapping[str, Any]
    reward: float
    ended: bool
    truncated: bool = False  # the game was cut by a limit of its own


class Game(Protocol):
    """One game, played once. Methods are called one after another, on the event loop; only `close`
    may be called while another call, which took too long, still runs."""

    async def reset(self) -> Mapping[str, Any]:
        """The fields of the first observation."""
        ...

    async def step(self, action: str, /) -> Move:
        """
        Raises:
            InvalidActionError: the text is no action; the game is as before.
        """
        ...

    async def close(self) -> None:
        """Called once, on every path."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GameTexts:
    """Templates of the messages, in the syntax of `str.format`; see `GameTask`."""

    system: str
    prompt: str
    reply: str
    invalid_reply: str
    answer_pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GameRewards:
    """How the rewards of the steps make that of the rollout; see `GameTask`."""

    total: Total
    discount: float
    invalid: float

    def of(self, rewards: Sequence[float], num_invalid: int) -> float:
        """
        >>> GameRewards(total="discounted", discount=0.5, invalid=-1.0).of([0.0, 4.0], 1)
        1.0
        """
        penalty = num_invalid * self.invalid if num_invalid else 0.0
        if self.total == "last":
            return penalty + (rewards[-1] if rewards else 0.0)
        discount = self.discount if self.total == "discounted" else 1.0
        return penalty + sum(discount**step * reward for step, reward in enumerate(rewards))


@dataclass
class GameEnv:
    """A `MessageEnv`. ``replays``: the game depends only on its problem and the answers."""

    game: Game
    texts: GameTexts
    rewards: GameRewards
    replays: bool = False
    _fields: Mapping[str, Any] = field(default_factory=dict, init=False)
    _earned: list[float] = field(default_factory=list, init=False)
    _num_invalid: int = field(default=0, init=False)

    async def reset(self) -> MessageObservation:
        self._fields = await self.game.reset()
        return MessageObservation(
            messages=as_messages(self._text("system"), self._text("prompt")),
        )

    async def step(self, message: Mapping[str, Any]) -> MessageObservation | Terminal:
        try:
            action = await extract(self.texts.answer_pattern, message.get("content") or "")
            if action is None:
                raise InvalidActionError("The answer has no action in the form that was asked for.")
            move = await self.game.step(action)
        except (InvalidActionError, CheckTimeoutError) as error:
            self._num_invalid += 1
            text = self._text("invalid_reply", error=str(error))
            return MessageObservation(messages=_user(text), turn_reward=self.rewards.invalid)
        self._fields = move.fields
        self._earned.append(move.reward)
        if move.ended or move.truncated:
            return self._terminal(truncated=move.truncated and not move.ended, earned=move.reward)
        return MessageObservation(messages=_user(self._text("reply")), turn_reward=move.reward)

    async def finish(self, status: RolloutStatus) -> Terminal:
        return self._terminal(truncated=True, earned=None)

    async def close(self) -> None:
        await self.game.close()

    def _text(self, name: str, **more: Any) -> str:
        values = {**self._fields, "steps": len(self._earned), **more}
        return fill(getattr(self.texts, name), values, f"task.{name}")

    def _terminal(self, *, truncated: bool, earned: float | None) -> Terminal:
        return Terminal(
            reward=self.rewards.of(self._earned, self._num_invalid),
            turn_reward=earned,
            metrics={
                "game_steps": float(len(self._earned)),
                INVALID_ACTIONS: float(self._num_invalid),
                "truncated": float(truncated),
            },
        )


class SeedRows:
    """Seeds as `Rows`: a problem is the seed that its game begins with."""

    def __init__(self, name: str, first: int, count: int) -> None:
        self.name = name
        self.blocks: Sequence[int] = (count,)
        self.size = json.dumps({"game": name, "first_seed": first, "count": count})
        self._first = first

    def number(self, block: int, index: int) -> int:
        return self._first + index

    def place(self, number: int) -> str:
        return f"{self.name}, seed {number}"

    def read(self, block: int, index: int) -> Row:
        return {"seed": self._first + index}


def _user(text: str) -> list[Mapping[str, str]]:
    return [{"role": "user", "content": text}]
