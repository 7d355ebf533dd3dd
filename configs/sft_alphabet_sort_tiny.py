"""Fine-tuning on right answers: the embedded policy of alphabet sort, before reinforcement learning
goes on with `alphabet_sort_tiny`. Takes a minute on two CPU cores.
"""

from __future__ import annotations

from torchtitan_rl import (
    ExamplesConfig,
    HeldOutConfig,
    OptimizerConfig,
    PolicyConfig,
    SftConfig,
    TrainerConfig,
)
from torchtitan_rl.experiments.alphabet_sort.make_files import MADE_DIR
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR

config = SftConfig(
    name="sft_alphabet_sort_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    examples=ExamplesConfig(
        train=(str(MADE_DIR / "conversations.jsonl"),),
        per_step=32,
        renderer="chatml",  # the tokens of `alphabet_sort_tiny`, whose policy does not think
    ),
    held_out=HeldOutConfig(files=(str(MADE_DIR / "conversations_held_out.jsonl"),), every=6),
    epochs=1,
    trainer=TrainerConfig(
        max_episode_tokens=256,
        max_tokens_per_microbatch=8192,
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=4),
    ),
)
