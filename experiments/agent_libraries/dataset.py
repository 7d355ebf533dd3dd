"""The word problems of `calculator_agent`, each without one of its numbers."""

from __future__ import annotations

import random
import re

from torchtitan_rl import Problem, Split
from torchtitan_rl.experiments.calculator_agent import dataset as whole
from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes


def make_problem(split: Split, index: int, sizes: ProblemSizes) -> Problem:
    """Problem ``index`` of ``split``. Its ``text`` has "some" for the number ``missing``;
    ``expression`` and ``answer`` are those of the whole problem."""
    data = whole.make_problem(split, index, sizes).data
    problem_id = f"agent_libraries/{split}/{index}"
    number = random.Random(problem_id).choice(re.findall(r"\d+", data["expression"]))
    text = re.sub(rf"\b{number}\b", "some", data["text"], count=1)
    return Problem(
        problem_id=problem_id,
        data={**data, "text": text[0].upper() + text[1:], "missing": int(number)},
    )
