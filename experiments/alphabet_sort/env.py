"""The environment of alphabet sort, with its problems and scores.

Each turn brings new names. An answer is the whole sorted list, one name a line. After the first
turn, the names of the newest message are followed by ``// new``. The score of an answer is between
0 and 1. The rollout's reward is the mean score over *all* turns of the problem, so turns that the
rollout did not reach count as 0.

A problem is a list of names for each turn. Invariants: those of `experiments.procedural`. The names
of a problem decide its split, so no problem is in both splits. No name is in a problem twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl import MessageObservation, Problem, RolloutStatus, Split, Terminal
from torchtitan_rl.experiments.procedural import split_of


class AlphabetSortEnv:
    """Implements `MessageEnv`. ``turns`` are the names of each turn; ``power`` as in `score`."""

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


_TEXT = """
Abigail Agnes Albert Amber Angela Barbara Bertha Bonnie Brenda Bruno Carl Cecil Claire Connor
Daisy David Denise Dominic Dorothy Edgar Eileen Elijah Emily Esther Felix Florence Frank Gail
Gemma Gilbert Gordon Guy Harriet Heather Henry Howard Ida Iris Ivan Jacob Janet Jean Joel Joyce
Karen Keith Kevin Kyle Lauren Leonard Lily Louis Luke Marcus Mark Mary Megan Mona Nancy Neil
Nigel Nora Olive Omar Otto Patrick Pearl Philip Quentin Rachel Rebecca Rhoda Robert Rosa Ruth
Samuel Scott Sharon Simon Steven Tania Thomas Tracy Tyler Ursula Vera Vincent Vivian Wanda Wendy
Winston Yolanda Zachary
"""

NAMES: tuple[str, ...] = tuple(_TEXT.split())


_INSTRUCTION = (
    "Sort the names alphabetically, one per line, and write nothing else.\n"
    "When more names come, answer with the whole sorted list "
    "and write // new after each name that just came."
)
_MORE = "More names:"


def user_message(turns: Sequence[Sequence[str]], turn: int) -> str:
    """Return the user's message of ``turn`` (from 0): the names, in the first turn with the
    rules."""
    return "\n".join([_INSTRUCTION if turn == 0 else _MORE, *turns[turn]])


NEW_MARK = "// new"


def right_answer(turns: Sequence[Sequence[str]], turn: int) -> list[str]:
    """Return the lines of the right answer in ``turn`` (from 0): all names so far. New names are
    marked, except in the first turn."""
    new = set(turns[turn]) if turn > 0 else set()
    names = sorted(name for names in turns[: turn + 1] for name in names)
    return [f"{name} {NEW_MARK}" if name in new else name for name in names]


def similarity(answer: Sequence[str], right: Sequence[str]) -> float:
    """Return twice the length of the longest common subsequence of lines, divided by the number of
    lines of both. This is 1 only if both are equal.

    Every missing, extra, misplaced or wrongly marked line costs about the same.
    """
    if not answer and not right:
        return 1.0
    return 2 * _common_subsequence_len(answer, right) / (len(answer) + len(right))


def score(answer: str, turns: Sequence[Sequence[str]], turn: int, *, power: float) -> float:
    """Return the similarity of ``answer`` to the right answer of ``turn``, to the power ``power``.

    Blank lines and the amount of white space do not count.
    """
    lines = [" ".join(line.split()) for line in answer.splitlines()]
    alike = similarity([line for line in lines if line], right_answer(turns, turn))
    return math.pow(alike, power)


def _common_subsequence_len(a: Sequence[str], b: Sequence[str]) -> int:
    """Compute the length by dynamic programming, one row at a time, in O(len(a) * len(b))."""
    row = [0] * (len(b) + 1)
    for item in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            above = row[j]
            row[j] = diagonal + 1 if item == other else max(above, row[j - 1])
            diagonal = above
    return row[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSizes:
    """How many turns a problem has, and how many new names come in each turn. Both are ranges that
    include minimum and maximum."""

    min_turns: int
    max_turns: int
    min_names: int
    max_names: int


def make_problem(split: Split, index: int, sizes: ProblemSizes) -> Problem:
    """Make problem ``index`` of ``split``; ``data["turns"]`` has a list of names for each turn."""
    rng = random.Random(f"alphabet_sort/{split}/{index}")
    while True:
        num_turns = rng.randint(sizes.min_turns, sizes.max_turns)
        counts = [rng.randint(sizes.min_names, sizes.max_names) for _ in range(num_turns)]
        names = rng.sample(NAMES, sum(counts))
        if split_of(" ".join(sorted(names))) == split:
            break
    turns = [[names.pop() for _ in range(count)] for count in counts]
    return Problem(problem_id=f"alphabet_sort/{split}/{index}", data={"turns": turns})
