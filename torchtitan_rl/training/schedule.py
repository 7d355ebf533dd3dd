"""The learning rate over a run: linear warm-up, constant, linear decay over the last steps."""

from __future__ import annotations

from torchtitan_rl.training.config import OptimizerConfig


def learning_rate_factor(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """What the learning rate is multiplied by at optimizer step ``step`` (the first is 0).

    Warm-up reaches 1 at its last step; decay would reach ``min_lr_factor`` one step after the
    last. Where the two overlap, the smaller holds. Steps beyond ``max_steps`` keep the last value.
    """
    step = min(step, max_steps - 1)
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    left = min(1.0, (max_steps - step) / (config.decay_steps + 1)) if config.decay_steps else 1.0
    return min(warmup, config.min_lr_factor + (1.0 - config.min_lr_factor) * left)
