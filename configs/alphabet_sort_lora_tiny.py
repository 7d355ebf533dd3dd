"""`alphabet_sort_tiny` with adapters of rank 8 in place of all weights; see docs/lora.md."""

from __future__ import annotations

from dataclasses import replace

from torchtitan_rl import LoraConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as _full

config = replace(
    _full,
    name="alphabet_sort_lora_tiny",
    policy=replace(_full.policy, lora=LoraConfig(rank=8)),
    trainer=replace(_full.trainer, optimizer=replace(_full.trainer.optimizer, learning_rate=4e-3)),
)
