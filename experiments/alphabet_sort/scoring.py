"""What the right answer is and how close an answer comes to it.

An answer is one name a line; a name of the current turn's message is followed by ``// new``,
except in the first turn, where every name would be. Scores are 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NEW_MARK = "// new"


def right_answer(turns: Sequence[Sequence[str]], turn: int) -> list[str]:
    """Lines of the right answer to turn ``turn`` (from 0): all names so far, new ones marked."""
    new = set(turns[turn]) if turn > 0 else set()
    names = sorted(name for names in turns[: turn + 1] for name in names)
    return [f"{name} {NEW_MARK}" if name in new else name for name in names]


def similarity(answer: Sequence[str], right: Sequence[str]) -> float:
    """Twice the longest common subsequence of lines, over the lines of both: 1 only if equal.

    Every missing, extra, misplaced or wrongly marked line costs about the same, so an answer that
    is nearly right scores nearly 1.
    """
    if not answer and not right:
        return 1.0
    return 2 * _common_subsequence_len(answer, right) / (len(answer) + len(right))


def score(answer: str, turns: Sequence[Sequence[str]], turn: int, *, power: float) -> float:
    """Similarity of the text to the right lines of ``turn``, to the power ``power``.

    Blank lines and the amount of white space do not count.
    """
    lines = [" ".join(line.split()) for line in answer.splitlines()]
    alike = similarity([line for line in lines if line], right_answer(turns, turn))
    return math.pow(alike, power)


def _common_subsequence_len(a: Sequence[str], b: Sequence[str]) -> int:
    """Textbook dynamic programme, one row at a time; O(len(a) * len(b))."""
    row = [0] * (len(b) + 1)
    for item in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            above = row[j]
            row[j] = diagonal + 1 if item == other else max(above, row[j - 1])
            diagonal = above
    return row[-1]
