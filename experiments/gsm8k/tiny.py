"""The simplified form for the embedded policy: one operation on small numbers.

The two files in ``made/`` have GSM8K's format. `MADE` made them, by `make_file`.
"""

from __future__ import annotations

from pathlib import Path

from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes
from torchtitan_rl.experiments.gsm8k.make_file import MakeFile
from torchtitan_rl.experiments.gsm8k.task import Gsm8kTask

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
