"""On-policy distillation in minutes on two CPU cores: the embedded policy learns from a teacher.

The teacher is what the default run made of the same policy. Make it first:

    torchtitan-rl train alphabet_sort_tiny

The student samples, one replica scores its tokens by the teacher, and no reward is trained on.
``train/reward_mean`` and ``teacher/kl_k1`` show what the student has learned.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_rl import OptimizerConfig, TeacherConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as reinforced

config = replace(
    reinforced,
    name="alphabet_sort_distilled_tiny",
    num_steps=40,
    teacher=TeacherConfig(checkpoint="outputs/alphabet_sort_tiny/policy"),
    rollout=replace(reinforced.rollout, advantage="none", groups_per_step=8),
    generator=replace(reinforced.generator, replicas=1),
    trainer=replace(
        reinforced.trainer,
        optimizer=OptimizerConfig(learning_rate=1e-3, decay_steps=20, min_lr_factor=0.1),
    ),
)
