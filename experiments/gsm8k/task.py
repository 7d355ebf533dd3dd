"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): word problems whose solutions end with ``#### N``.

The prompt asks for the same ending. Download the data::

    hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k

Without a network, ``make_file.py`` makes problems of the same format.

`TASK` is a simpler form for the embedded policy, with one operation on small numbers. Its problems
are the two files in ``made/``, which have GSM8K's format; `make_file` made them with the options
`MADE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan_rl import DataTask
from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes
from torchtitan_rl.experiments.gsm8k.make_file import MakeFile

_ENDING = r"####\s*(\S.*)"


@dataclass(frozen=True, kw_only=True)
class Gsm8kTask(DataTask):
    """Word problems; the answer follows ``####`` and is compared by `math-verify`."""

    train: tuple[str, ...] = ("data/gsm8k/main/train-*.parquet",)
    validation: tuple[str, ...] = ("data/gsm8k/main/test-*.parquet",)
    prompt: str = '{question} Let\'s think step by step and output the final answer after "####".'
    right_answer_pattern: str = _ENDING
    answer_pattern: str = _ENDING
    compare: Literal["exact", "number", "math"] = "math"


HERE = Path(__file__).parent
POLICY_DIR = HERE / "policy"  # the embedded policy, in Hugging Face format
SIZES = ProblemSizes(two_operations=0.0, max_number=12)
MADE = tuple(
    MakeFile(
        output=HERE / "made" / name,
        num_problems=number,
        first=first,
        two_operations=SIZES.two_operations,
        max_number=SIZES.max_number,
    )
    for name, number, first in (("train.jsonl", 512, 0), ("test.jsonl", 128, 10_000))
)

TASK = Gsm8kTask(
    train=(str(MADE[0].output),),
    validation=(str(MADE[1].output),),
    prompt="{question}",
    renderer="chatml",
)
