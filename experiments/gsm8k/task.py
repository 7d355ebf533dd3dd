"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): word problems whose solutions end with ``#### N``.

The prompt asks for the same ending. Fetch the data where there is a network::

    hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k

``make_file.py`` makes problems of the same format where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtitan_rl import DataTask

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
