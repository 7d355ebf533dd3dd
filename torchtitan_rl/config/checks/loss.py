"""Combinations of `LossConfig` fields that are refused; `rules` has the values of each field.

Three policies take part: behaviour (sampled the tokens), proximal (the ratio is taken against it)
and the policy that is trained. policy / proximal is the ratio, proximal / behaviour the importance
weight. Each of the two must be corrected exactly once.
"""

from __future__ import annotations

from torchtitan_rl.training.config import LossConfig


def loss_errors(config: LossConfig, *, staleness: int) -> list[str]:
    """One message per error: field, value, fix. ``staleness`` is `ScheduleConfig.staleness`."""
    return [*_corrections(config, staleness), *_lengths(config)]


def _corrections(config: LossConfig, staleness: int) -> list[str]:
    errors = []
    if config.proximal_policy == "behaviour" and config.importance_weight != "none":
        errors.append(
            f"trainer.loss.importance_weight is {config.importance_weight}: with "
            "trainer.loss.proximal_policy behaviour the ratio already is policy / behaviour, and a "
            "weight would correct twice; give none, or trainer.loss.proximal_policy recomputed"
        )
    if config.proximal_policy == "interpolated" and staleness == 0:
        errors.append(
            "trainer.loss.proximal_policy is interpolated: with schedule.staleness 0 no version "
            "lies between behaviour and policy; give recomputed or behaviour"
        )
    elif config.proximal_policy != "behaviour" and config.importance_weight == "none":
        errors.append(
            f"trainer.loss.proximal_policy is {config.proximal_policy}: without a weight nothing "
            "corrects for the policy that sampled the tokens; give importance_weight token or "
            "sequence, or proximal_policy behaviour"
        )
    if config.proximal_policy == "recomputed" and config.ratio == "sequence":
        errors.append(
            "trainer.loss.ratio is sequence: with proximal_policy recomputed every ratio is 1 and "
            "the choice would do nothing; give token, or importance_weight sequence for a "
            "sequence-level correction"
        )
    return errors


def _lengths(config: LossConfig) -> list[str]:
    if config.aggregation == "constant" and config.constant_length < 1:
        return [
            f"trainer.loss.constant_length is {config.constant_length}: "
            "trainer.loss.aggregation constant divides by it; give the longest response in tokens, "
            "rollout.max_total_tokens for one"
        ]
    if config.aggregation != "constant" and config.constant_length != 0:
        return [
            f"trainer.loss.constant_length is {config.constant_length}: "
            f"trainer.loss.aggregation {config.aggregation} does not read it; give 0, or constant"
        ]
    return []
