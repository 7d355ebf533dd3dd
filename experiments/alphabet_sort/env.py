"""The environment of one rollout: each turn brings names, each answer is the whole sorted list.

The rollout's reward is the mean of its turns' scores over *all* turns of the problem, so that
turns it did not reach count 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_rl import MessageObservation, RolloutStatus, Terminal
from torchtitan_rl.experiments.alphabet_sort.prompts import user_message
from torchtitan_rl.experiments.alphabet_sort.scoring import score


class AlphabetSortEnv:
    """A `MessageEnv`. ``turns`` are the names of each turn; ``power`` as in `scoring.score`."""

    replays = True  # it depends only on the problem and the completions

    def __init__(self, turns: Sequence[Sequence[str]], *, power: float) -> None:
        self._turns = turns
        self._power = power
        self._scores: list[float] = []

    async def reset(self) -> MessageObservation:
        return MessageObservation(messages=[self._user(0)])

    async def step(self, message: Mapping[str, Any]) -> MessageObservation | Terminal:
        turn = len(self._scores)
        earned = score(message.get("content") or "", self._turns, turn, power=self._power)
        self._scores.append(earned)
        if len(self._scores) == len(self._turns):
            return self._terminal(RolloutStatus.COMPLETED, turn_reward=earned)
        return MessageObservation(messages=[self._user(turn + 1)], turn_reward=earned)

    async def finish(self, status: RolloutStatus) -> Terminal:
        return self._terminal(status, turn_reward=None)

    async def close(self) -> None:
        """There is nothing to release."""

    def _user(self, turn: int) -> dict[str, str]:
        return {"role": "user", "content": user_message(self._turns, turn)}

    def _terminal(self, status: RolloutStatus, *, turn_reward: float | None) -> Terminal:
        right = sum(earned == 1.0 for earned in self._scores)
        return Terminal(
            reward=sum(self._scores) / len(self._turns),
            status=status,
            turn_reward=turn_reward,
            metrics={"right_turns": right / len(self._turns)},
        )
