"""Procedural problems: lists of names, one list a turn.

Invariants: those of `experiments.procedural`. No problem of one split is in the other, because the
names themselves decide the split. No name comes twice in a problem.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from torchtitan_rl import Problem, Split
from torchtitan_rl.experiments.alphabet_sort.names import NAMES
from torchtitan_rl.experiments.procedural import split_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSizes:
    """Number of turns of a problem and of new names in each turn; both ends included."""

    min_turns: int
    max_turns: int
    min_names: int
    max_names: int


def make_problem(split: Split, index: int, sizes: ProblemSizes) -> Problem:
    """Problem ``index`` of ``split``; ``data["turns"]`` holds one list of names for each turn."""
    rng = random.Random(f"alphabet_sort/{split}/{index}")
    while True:
        num_turns = rng.randint(sizes.min_turns, sizes.max_turns)
        counts = [rng.randint(sizes.min_names, sizes.max_names) for _ in range(num_turns)]
        names = rng.sample(NAMES, sum(counts))
        if split_of(" ".join(sorted(names))) == split:
            break
    turns = [[names.pop() for _ in range(count)] for count in counts]
    return Problem(problem_id=f"alphabet_sort/{split}/{index}", data={"turns": turns})
