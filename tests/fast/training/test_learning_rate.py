"""The learning-rate schedule."""

from __future__ import annotations

from torchtitan_rl.training.config import OptimizerConfig


def factors(config: OptimizerConfig, max_steps: int) -> list[float]:
    steps = range(max_steps)
    return [round(config.learning_rate_factor(step, max_steps), 6) for step in steps]


def test_the_learning_rate_warms_up_stays_and_decays_over_the_last_steps() -> None:
    config = OptimizerConfig(warmup_steps=2, decay_steps=3, min_lr_factor=0.2)
    assert factors(config, 7) == [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4]
