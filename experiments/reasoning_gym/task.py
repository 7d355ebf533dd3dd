"""The tasks of the embedded policy: one of arithmetic, one algorithmic."""

from __future__ import annotations

from pathlib import Path

from torchtitan_rl import ReasoningGymTask

POLICY_DIR = Path(__file__).parent / "policy"  # the embedded policy, in Hugging Face format

TASK = ReasoningGymTask(
    tasks={"chain_sum": 1.0, "spell_backward": 1.0},
    options={
        "chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1},
        "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    },
    system="",
    answer_pattern="",  # the whole completion is the answer
    renderer="chatml",
)
