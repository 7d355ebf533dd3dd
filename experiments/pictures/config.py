"""Colours in made pictures, with the policy that ``warm_start.py`` makes, on two CPU cores.

Needs torchvision: see docs/images.md. A vLLM replica generates, one torchtitan process trains the
decoder and the vision tower, synchronously.
"""

from __future__ import annotations

from torchtitan_rl import (
    EvaluationConfig,
    GeneratorConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from torchtitan_rl.experiments.pictures.task import PicturesTask

config = RunConfig(
    name="pictures",
    policy=PolicyConfig(checkpoint="outputs/pictures_policy"),
    task=PicturesTask(),
    num_steps=60,
    rollout=RolloutConfig(
        groups_per_step=16,
        group_size=8,
        max_turns=1,
        max_total_tokens=48,
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=4),
    ),
    generator=GeneratorConfig(replicas=1, max_model_len=64, max_running_requests=128),
    trainer=TrainerConfig(
        max_episode_tokens=48,
        max_tokens_per_microbatch=4096,
        train_vision_tower=True,
        optimizer=OptimizerConfig(learning_rate=1e-3, decay_steps=20, min_lr_factor=0.1),
    ),
    evaluation=EvaluationConfig(every=20, num_problems=128, temperature=1.0),
)
