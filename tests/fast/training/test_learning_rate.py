"""The learning-rate schedule."""

from __future__ import annotations

from torchtitan_rl.training.config import OptimizerConfig


def factors(config: OptimizerConfig, max_steps: int) -> list[float]:
    steps = range(max_steps)
    return [round(config.learning_rate_factor(step, max_steps), 6) for step in steps]


def test_the_learning_rate_warms_up_stays_and_decays_over_the_last_steps() -> None:
    config = OptimizerConfig(warmup_steps=2, decay_steps=3, min_lr_factor=0.2)
    assert factors(config, 7) == [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4]


def test_a_shorter_run_begins_at_the_peak_and_decays_to_its_end() -> None:
    config = OptimizerConfig(decay_steps=60, min_lr_factor=0.1)
    assert factors(config, 4) == [1.0, 0.775, 0.55, 0.325]
    warmed = OptimizerConfig(warmup_steps=2, decay_steps=60)
    assert factors(warmed, 5) == [0.5, 1.0, 0.75, 0.5, 0.25]
    assert factors(OptimizerConfig(warmup_steps=4, decay_steps=60), 2) == [0.25, 0.5]
