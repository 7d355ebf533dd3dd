"""Makes a file of word problems in the format of GSM8K, for machines without a network.

    python -m torchtitan_rl.experiments.gsm8k.make_file --output data/gsm8k_made/train.jsonl

The stories are those of `experiments.calculator_agent`, with one or two operations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes, make_problem


@dataclass(frozen=True, kw_only=True)
class MakeFile:
    output: Path
    num_problems: int = 100
    first: int = 0  # index of the first problem; files with different ranges share no problem
    two_operations: float = 0.5  # share of problems with two operations; the others have one
    max_number: int = 99


def main(config: MakeFile) -> None:
    config.output.parent.mkdir(parents=True, exist_ok=True)
    sizes = ProblemSizes(two_operations=config.two_operations, max_number=config.max_number)
    numbers = range(config.first, config.first + config.num_problems)
    lines = [json.dumps(row(make_problem("train", number, sizes).data)) for number in numbers]
    config.output.write_text("".join(f"{line}\n" for line in lines))


def row(problem: Any) -> dict[str, str]:
    """Make a row with a solution in GSM8K's form: ``<<2+3=5>>`` marks a calculation."""
    expression, answer = problem["expression"], problem["answer"]
    solution = f"The answer is {expression} = <<{expression}={answer}>>{answer}.\n#### {answer}"
    return {"question": problem["text"], "answer": solution}


if __name__ == "__main__":
    main(tyro.cli(MakeFile, description=__doc__))
