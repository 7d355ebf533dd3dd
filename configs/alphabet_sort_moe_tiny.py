"""Alphabet sort as in `alphabet_sort_tiny`, with a policy whose layers have 4 experts, 2 of which
compute each token (Qwen3-MoE).

    torchtitan-rl train alphabet_sort_moe_tiny
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_rl import PolicyConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as dense
from torchtitan_rl.experiments.alphabet_sort_moe.upcycle import POLICY_DIR

config = replace(
    dense, name="alphabet_sort_moe_tiny", policy=PolicyConfig(checkpoint=str(POLICY_DIR))
)
