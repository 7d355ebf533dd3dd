"""Games in chat messages: observations become text, answers become actions, rewards add up.

A `Game` is for example a gymnasium environment, an OpenEnv server, or your own code; `GameTask` is
the base class of tasks with games, whose problems are seeds. An invalid action is answered with the
reason, does not change the game, and is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from annotated_types import Interval

from torchtitan_rl.bounds import OpenShare, PositiveShare
from torchtitan_rl.data.columns import fill, pattern_errors, template_errors
from torchtitan_rl.data.row_dataset import split_of_rows
from torchtitan_rl.data.rows import Rows
from torchtitan_rl.environments.question import as_messages
from torchtitan_rl.environments.scoring import CheckTimeoutError, extract
from torchtitan_rl.rollout.env import Terminal, TokenEnv
from torchtitan_rl.rollout.message_env import MessageObservation, MessageTokenEnv
from torchtitan_rl.rollout.rendering import RendererKind, Thinking, make_renderer
from torchtitan_rl.rollout.task import Dataset, Split, Task
from torchtitan_rl.types import Problem, RolloutStatus

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig

INVALID_ACTIONS = "invalid_actions"  # a metric, also read by `torchtitan-rl env check`
TEXTS = ("system", "prompt", "reply", "invalid_reply")
_TOLERANCE = 1e-9  # rounding of sums of rewards


class InvalidActionError(Exception):
    """An answer is not a valid action; the message tells the policy why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The result of an action. Templates use ``fields``: ``observation`` and others."""

    fields: Mapping[str, Any]
    reward: float
    ended: bool
    truncated: bool = False  # a limit of the game ended it early


class Game(Protocol):
    """One game, played once. Methods are called one after another, on the event loop; but if a call
    takes too long, `close` may be called while it is still running."""

    async def reset(self) -> Mapping[str, Any]:
        """Begin the game, and return the fields of the first observation."""

    async def step(self, action: str, /) -> Move:
        """Perform an action. Raises InvalidActionError: the text is not an action; the game is
        unchanged."""

    async def close(self) -> None:
        """Release the game. Called exactly once, even after an error."""


@dataclass(frozen=True, kw_only=True)
class GameTask(Task):
    """Games that begin with a seed. A subclass overrides `game` and `name`.

    The texts are templates with ``{observation}``, ``{actions}`` (the possible actions),
    ``{steps}`` (the number of steps so far) and the other fields of the game.
    """

    system: str = (
        "Think step by step, then write one action, and nothing else, between <answer> and "
        "</answer>."
    )
    """The system message. Empty: no system message."""
    prompt: str = "{observation}\n\nActions: {actions}"
    """The user's first message."""
    reply: str = "{observation}"
    """The user's message after an action."""
    invalid_reply: str = "{error} Actions: {actions}"
    """The user's message after an answer without a valid action. ``{error}`` is the reason."""
    answer_pattern: str = r"(?s)<answer>(.*?)</answer>"
    """Regular expression whose last match in an answer is the action; its first group, if it has
    one. Empty: the whole answer."""
    reward: Literal["sum", "last", "discounted"] = "sum"
    """The rollout's reward: the ``sum`` of the steps' rewards, the ``last`` one, or the
    ``discounted`` sum."""
    discount: PositiveShare = 0.99
    """With ``discounted``, step ``n`` counts ``discount**n``, the first with ``n = 0``."""
    invalid_reward: Annotated[float, Interval(ge=-1e6, le=1e6)] = 0.0
    """Added to the rollout's reward for each answer without a valid action."""
    solved_at: float = 1.0
    """Smallest reward of a game that counts as solved (pass@k). Give less than 1 if ``discounted``
    or ``invalid_reward`` makes the reward of a won game smaller."""
    num_problems: Annotated[int, Interval(ge=1, le=100_000_000)] = 10_000
    """Number of seeds in an epoch, including those for validation."""
    validation_share: OpenShare = 0.1
    """Share of the seeds that are kept for validation."""
    data_seed: Annotated[int, Interval(ge=0, le=2_000_000_000)] = 0  # later ones fit 32 bits, too
    """The first seed; the run's seed decides only the order."""
    replays: bool = True
    """Whether a game depends on nothing but its seed and the actions, so that a resumed run can
    play it again to where it was."""
    renderer: RendererKind = "auto"
    """How messages become tokens; ``auto`` chooses the renderer that fits the model."""
    thinking: Thinking = "off"
    """How Qwen3 thinks: ``off`` prefills an empty thought, ``keep`` and ``strip`` let it think."""

    def name(self) -> str:
        """The prefix of the problems' ids."""
        raise NotImplementedError(f"{type(self).__name__} does not override `name`")

    def game(self, seed: int) -> Game:
        """Make a new game. Called on the event loop: slow set-up belongs into `Game.reset`."""
        raise NotImplementedError(f"{type(self).__name__} does not override `game`")

    def total(self, rewards: Sequence[float], num_invalid: int) -> float:
        """Combine the steps' rewards into the rollout's reward; see ``reward``."""
        counted = rewards[-1:] if self.reward == "last" else rewards
        discount = self.discount if self.reward == "discounted" else 1.0
        total = sum(discount**step * reward for step, reward in enumerate(counted))
        return total + (num_invalid * self.invalid_reward if num_invalid else 0.0)

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        name, first, count = self.name(), self.data_seed, self.num_problems
        rows = Rows(
            name=name,
            size=json.dumps({"game": name, "first_seed": first, "count": count}),
            blocks=(count,),
            read=lambda index: {"seed": first + index},
            place=f"{name}, seed",
            first=first,
        )
        share = self.validation_share
        return split_of_rows(rows, split, share, text=lambda row: str(row["seed"]), seed=seed)

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        return MessageTokenEnv(GameEnv(self, self.game(problem.data["seed"])), renderer)

    def success_reward(self) -> float:
        return self.solved_at - _TOLERANCE

    def errors(self) -> list[str]:
        patterns = pattern_errors(self, "task", "answer_pattern")
        return patterns + template_errors(self, "task", *TEXTS)


class GameEnv:
    """A `MessageEnv`: plays ``game`` with the templates and rewards of ``task``."""

    def __init__(self, task: GameTask, game: Game) -> None:
        self._task = task
        self._game = game
        self._fields: Mapping[str, Any] = {}
        self._earned: list[float] = []
        self._num_invalid = 0
        self.replays = task.replays

    async def reset(self) -> MessageObservation:
        self._fields = await self._game.reset()
        return MessageObservation(messages=as_messages(self._text("system"), self._text("prompt")))

    async def step(self, message: Mapping[str, Any]) -> MessageObservation | Terminal:
        try:
            action = await extract(self._task.answer_pattern, message.get("content") or "")
            if action is None:
                raise InvalidActionError("The answer has no action in the form that was asked for.")
            move = await self._game.step(action)
        except (InvalidActionError, CheckTimeoutError) as error:
            self._num_invalid += 1
            return self._observation("invalid_reply", self._task.invalid_reward, error=str(error))
        self._fields = move.fields
        self._earned.append(move.reward)
        if move.ended or move.truncated:
            return self._terminal(truncated=move.truncated and not move.ended, earned=move.reward)
        return self._observation("reply", move.reward)

    async def finish(self, status: RolloutStatus) -> Terminal:
        return self._terminal(truncated=True, earned=None)

    async def close(self) -> None:
        await self._game.close()

    def _observation(self, text: str, earned: float, **more: str) -> MessageObservation:
        messages = as_messages("", self._text(text, **more))
        return MessageObservation(messages=messages, turn_reward=earned)

    def _text(self, name: str, **more: str) -> str:
        values = {**self._fields, "steps": len(self._earned), **more}
        return fill(getattr(self._task, name), values, f"task.{name}")

    def _terminal(self, *, truncated: bool, earned: float | None) -> Terminal:
        return Terminal(
            reward=self._task.total(self._earned, self._num_invalid),
            turn_reward=earned,
            metrics={
                "game_steps": float(len(self._earned)),
                INVALID_ACTIONS: float(self._num_invalid),
                "truncated": float(truncated),
            },
        )
