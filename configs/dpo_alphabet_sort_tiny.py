"""Training on pairs of a right answer and one with mistakes: the embedded policy of alphabet sort.
Takes a minute on two CPU cores.
"""

from __future__ import annotations

from torchtitan_rl import (
    DpoConfig,
    HeldOutConfig,
    OptimizerConfig,
    PairsConfig,
    PolicyConfig,
    TrainerConfig,
)
from torchtitan_rl.experiments.alphabet_sort.make_files import MADE_DIR
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR

config = DpoConfig(
    name="dpo_alphabet_sort_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    pairs=PairsConfig(
        train=(str(MADE_DIR / "pairs.jsonl"),),
        per_step=32,
        renderer="chatml",  # the tokens of `alphabet_sort_tiny`, whose policy does not think
    ),
    beta=0.1,
    held_out=HeldOutConfig(files=(str(MADE_DIR / "pairs_held_out.jsonl"),), every=12),
    epochs=2,
    trainer=TrainerConfig(
        max_episode_tokens=256,
        max_tokens_per_microbatch=8192,
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
    ),
)
