"""Conversations to imitate: right answers, and answers with mistakes of three kinds.

A policy trained on random mistakes rarely gives the right answer but can: reinforcement learning
has something to improve and quickly succeeds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl import ChatRenderer, Episode
from torchtitan_rl.experiments import tiny_policy
from torchtitan_rl.experiments.alphabet_sort.prompts import user_message
from torchtitan_rl.experiments.alphabet_sort.scoring import NEW_MARK, right_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Probabilities: of a name to be left out, of a mark to be wrong (not in the first turn), of
    two neighbours to change places. Below 0.5 each, the right answer stays the likeliest."""

    omit: float = 0.0
    mark: float = 0.0
    swap: float = 0.0


def demonstration(
    turns: Sequence[Sequence[str]],
    *,
    mistakes: Mistakes,
    rng: random.Random,
    renderer: ChatRenderer,
    tokenizer: Any,
    name: str,
) -> Episode:
    """The conversation of a problem as one episode, with loss on the answers and their ends."""
    said = []
    for turn in range(len(turns)):
        message = {"role": "user", "content": user_message(turns, turn)}
        lines = with_mistakes(right_answer(turns, turn), mistakes, rng=rng, marks=turn > 0)
        said.append(([message], "\n".join(lines)))
    return tiny_policy.demonstration(name, said, renderer=renderer, tokenizer=tokenizer)


def with_mistakes(
    lines: Sequence[str], mistakes: Mistakes, *, rng: random.Random, marks: bool
) -> list[str]:
    """The lines with mistakes, each drawn independently."""
    kept = [line for line in lines if rng.random() >= mistakes.omit]
    if marks:
        kept = [_flip_mark(line) if rng.random() < mistakes.mark else line for line in kept]
    place = 0
    while place + 1 < len(kept):
        if rng.random() < mistakes.swap:
            kept[place], kept[place + 1] = kept[place + 1], kept[place]
            place += 1
        place += 1
    return kept


def _flip_mark(line: str) -> str:
    return line.removesuffix(f" {NEW_MARK}") if line.endswith(NEW_MARK) else f"{line} {NEW_MARK}"
