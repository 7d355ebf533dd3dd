"""What is wrong with a `LossConfig`, above all combinations that correct twice for one thing.

Three policies take part: behaviour (sampled the tokens), anchor (the ratio is taken against it),
policy (is trained). policy / anchor is the ratio, anchor / behaviour the weight; each of the two
must be corrected for once.
"""

from __future__ import annotations

import math

from torchtitan_rl.config import LossConfig


def loss_mistakes(config: LossConfig, *, staleness: int) -> list[str]:
    """One message per mistake: field, value, fix. ``staleness`` is `ScheduleConfig.staleness`."""
    return [*_corrections(config, staleness), *_amounts(config)]


def _corrections(config: LossConfig, staleness: int) -> list[str]:
    mistakes = []
    if config.anchor == "behaviour" and config.weight != "none":
        mistakes.append(
            f"trainer.loss.weight is {config.weight}: with anchor behaviour the ratio already is "
            "policy / behaviour, and a weight would correct twice; give none, or anchor recomputed"
        )
    if config.anchor != "behaviour" and config.weight == "none":
        mistakes.append(
            f"trainer.loss.anchor is {config.anchor}: without a weight nothing corrects for the "
            "policy that sampled the tokens; give weight token or sequence, or anchor behaviour"
        )
    if config.anchor == "interpolated" and staleness == 0:
        mistakes.append(
            "trainer.loss.anchor is interpolated: with schedule.staleness 0 no version lies "
            "between behaviour and policy; give recomputed or behaviour"
        )
    if config.anchor == "recomputed" and config.ratio == "sequence":
        mistakes.append(
            "trainer.loss.ratio is sequence: with anchor recomputed every ratio is 1 and the "
            "choice would do nothing; give token, or weight sequence for sequence-level correction"
        )
    return mistakes


def _amounts(config: LossConfig) -> list[str]:
    mistakes = []
    if not (math.isfinite(config.weight_cap) and config.weight_cap >= 1.0):
        mistakes.append(
            f"trainer.loss.weight_cap is {config.weight_cap}: give a finite number of at least 1, "
            "which is the weight of a token that is on policy"
        )
    if not 0.0 < config.mask_low < 1.0:
        mistakes.append(
            f"trainer.loss.mask_low is {config.mask_low}: give a number between 0 and 1, for 1 is "
            "the ratio of a token that is on policy"
        )
    if not (math.isfinite(config.mask_high) and config.mask_high > 1.0):
        mistakes.append(
            f"trainer.loss.mask_high is {config.mask_high}: give a finite number above 1, for 1 is "
            "the ratio of a token that is on policy"
        )
    if config.aggregation == "constant" and config.constant_length < 1:
        mistakes.append(
            f"trainer.loss.constant_length is {config.constant_length}: aggregation constant "
            "divides by it; give the longest response in tokens, rollout.max_total_tokens for one"
        )
    if config.aggregation != "constant" and config.constant_length != 0:
        mistakes.append(
            f"trainer.loss.constant_length is {config.constant_length}: aggregation "
            f"{config.aggregation} does not read it; give 0, or aggregation constant"
        )
    if not (math.isfinite(config.kl_coefficient) and config.kl_coefficient >= 0.0):
        mistakes.append(
            f"trainer.loss.kl_coefficient is {config.kl_coefficient}: give a finite number, 0 for "
            "no KL penalty"
        )
    return mistakes
