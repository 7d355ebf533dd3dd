"""Writes the conversations and pairs of the ready configurations `sft_alphabet_sort_tiny` and
`dpo_alphabet_sort_tiny`, about problems that reinforcement learning does not use.

    python -m torchtitan_rl.experiments.alphabet_sort.make_files [--output-dir DIR]

A conversation has right answers. A pair has the same questions, the right last answer, and one with
mistakes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from torchtitan_rl.experiments.alphabet_sort.env import ProblemSizes, make_problem, right_answer
from torchtitan_rl.experiments.alphabet_sort.env import user_message as question
from torchtitan_rl.experiments.alphabet_sort.warm_start import Mistakes, with_mistakes

MADE_DIR = Path(__file__).parent / "made"
SIZES = ProblemSizes(min_turns=2, max_turns=3, min_names=2, max_names=2)
_FIRST_PROBLEM = 2_000_000
_MISTAKES = Mistakes(omit=0.1, mark=0.35, swap=0.35)


@dataclass(frozen=True, kw_only=True)
class Files:
    output_dir: Path = MADE_DIR
    num_rows: int = 384
    num_held_out: int = 64


def conversation(number: int) -> list[dict[str, str]]:
    """Make the conversation about a problem, with right answers."""
    turns = make_problem("train", _FIRST_PROBLEM + number, SIZES).data["turns"]
    messages = []
    for turn in range(len(turns)):
        messages.append({"role": "user", "content": question(turns, turn)})
        answer = "\n".join(right_answer(turns, turn))
        messages.append({"role": "assistant", "content": answer})
    return messages


def pair(number: int, rng: random.Random) -> dict[str, Any]:
    """Make the pair about a problem."""
    *prompt, last = conversation(number)
    right = last["content"].split("\n")
    wrong = right
    while wrong in (right, []):
        wrong = with_mistakes(right, _MISTAKES, rng=rng, marks=True)
    return {"prompt": prompt, "chosen": last["content"], "rejected": "\n".join(wrong)}


def main(files: Files) -> None:
    rng = random.Random(0)
    held_out = range(files.num_rows, files.num_rows + files.num_held_out)
    for name, numbers in {"": range(files.num_rows), "_held_out": held_out}.items():
        _write(files.output_dir / f"conversations{name}.jsonl", [_row(one) for one in numbers])
        _write(files.output_dir / f"pairs{name}.jsonl", [pair(one, rng) for one in numbers])


def _row(number: int) -> dict[str, Any]:
    return {"messages": conversation(number)}


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main(tyro.cli(Files, description=__doc__))
