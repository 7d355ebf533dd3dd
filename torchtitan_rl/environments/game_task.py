"""The part that tasks of games share: seeds as problems, templates, rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan_rl.data.columns import template_error
from torchtitan_rl.data.row_dataset import RowDataset
from torchtitan_rl.data.rows import Row, in_split
from torchtitan_rl.environments.games import Game, GameEnv, GameRewards, GameTexts, SeedRows, Total
from torchtitan_rl.environments.scoring import pattern_errors
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.message_env import MessageTokenEnv
from torchtitan_rl.rollout.rendering import RendererKind, Thinking, make_renderer
from torchtitan_rl.rollout.task import Dataset, Split, Task
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig

TEXTS = ("system", "prompt", "reply", "invalid_reply")
_MAX_SEED = 2_000_000_000  # and the seeds that follow it, in 32 bits
_MAX_PROBLEMS = 100_000_000
_MAX_REWARD = 1e6
_TOLERANCE = 1e-9  # of sums of rewards


@dataclass(frozen=True, kw_only=True)
class GameTask(Task):
    """Games that begin with a seed. A subclass overrides `game` and `name`.

    The texts are templates: ``{observation}``, ``{actions}`` (what can be chosen), ``{steps}`` (how
    many were made) and the other fields of the game.
    """

    system: str = (
        "Think step by step, then write one action, and nothing else, between <answer> and "
        "</answer>."
    )
    """The system message; none where it is empty."""
    prompt: str = "{observation}\n\nActions: {actions}"
    """The user's first message."""
    reply: str = "{observation}"
    """The user's message after an action."""
    invalid_reply: str = "{error} Actions: {actions}"
    """The user's message after an answer that is no action; ``{error}`` says why."""
    answer_pattern: str = r"(?s)<answer>(.*?)</answer>"
    """Regular expression whose last match in an answer is the action; its first group, if it has
    one. Empty: the whole answer."""
    reward: Total = "sum"
    """The rollout's reward: the ``sum`` of the steps' rewards, the ``last`` one, or the
    ``discounted`` sum."""
    discount: float = 0.99
    """With ``discounted``, step ``n`` counts ``discount**n``, the first with ``n = 0``."""
    invalid_reward: float = 0.0
    """Added to the rollout's reward for each answer that is no action."""
    solved_at: float = 1.0
    """Reward from which a game counts as solved (pass@k). Give less where
    ``discounted`` or ``invalid_reward`` take from the reward of a game that is won."""
    num_problems: int = 10_000
    """Seeds in an epoch, those for validation included."""
    validation_share: float = 0.1
    """Share of the seeds that are kept for validation."""
    data_seed: int = 0
    """The first seed; the run's seed decides only the order."""
    replays: bool = True
    """Whether a game depends on nothing but its seed and the actions, so that a resumed run can
    play it again to where it was."""
    renderer: RendererKind = "auto"
    """How messages become tokens; ``auto`` goes by the model."""
    thinking: Thinking = "off"
    """Of Qwen3: ``off`` prefills an empty thought, ``keep`` and ``strip`` let it think."""

    def name(self) -> str:
        """Problems' ids begin with it."""
        raise NotImplementedError(f"{type(self).__name__} does not override `name`")

    def game(self, seed: int) -> Game:
        """A new game. Called on the event loop: slow set-up belongs into its `reset`."""
        raise NotImplementedError(f"{type(self).__name__} does not override `game`")

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        def make(problem_id: str, place: str, row: Row) -> Problem | None:
            if not in_split(split, str(row["seed"]), self.validation_share):
                return None
            return Problem(problem_id=problem_id, data=dict(row))

        return RowDataset(
            [SeedRows(self.name(), self.data_seed, self.num_problems)],
            make,
            seed=seed,
            shuffle=split == "train",
            chosen_by="task.num_problems and task.validation_share",
        )

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        texts = {name: getattr(self, name) for name in TEXTS}
        env = GameEnv(
            self.game(problem.data["seed"]),
            GameTexts(**texts, answer_pattern=self.answer_pattern),
            GameRewards(total=self.reward, discount=self.discount, invalid=self.invalid_reward),
            replays=self.replays,
        )
        return MessageTokenEnv(env, renderer)

    def success_reward(self) -> float:
        return self.solved_at - _TOLERANCE

    def errors(self) -> list[str]:
        found = pattern_errors("answer_pattern", self.answer_pattern)
        for name in TEXTS:
            if wrong := template_error(getattr(self, name)):
                found.append(f"task.{name}={getattr(self, name)!r}: {wrong}")
        if not 0 < self.discount <= 1:
            found.append(f"task.discount={self.discount}: must be above 0, and at most 1")
        if not abs(self.invalid_reward) <= _MAX_REWARD:
            found.append(
                f"task.invalid_reward={self.invalid_reward}: must be between -{_MAX_REWARD:g} and "
                f"{_MAX_REWARD:g}"
            )
        if not math.isfinite(self.solved_at):
            found.append(f"task.solved_at={self.solved_at}: must be finite")
        if not 1 <= self.num_problems <= _MAX_PROBLEMS:
            found.append(f"task.num_problems={self.num_problems}: must be 1 to {_MAX_PROBLEMS}")
        if not 0 < self.validation_share < 1:
            found.append(f"task.validation_share={self.validation_share}: must be between 0 and 1")
        if not 0 <= self.data_seed <= _MAX_SEED:
            found.append(f"task.data_seed={self.data_seed}: must be 0 to {_MAX_SEED}")
        return found
