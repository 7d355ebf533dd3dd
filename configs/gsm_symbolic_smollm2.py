"""``gsm_symbolic`` of reasoning-gym, endless problems like GSM8K's, with SmolLM2-135M on the CPU.

Needs ``pip install 'torchtitan-rl[smollm2,tasks]'`` and no data. Shows that everything fits
together; to learn, use a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_rl import ReasoningGymTask
from torchtitan_rl.configs import gsm8k_smollm2

config = replace(
    gsm8k_smollm2.config,
    name="gsm_symbolic_smollm2",
    task=ReasoningGymTask(tasks={"gsm_symbolic": 1.0}, renderer="chatml"),
)
