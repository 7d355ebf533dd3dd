"""What does not go together in a `LossConfig`, above all what corrects twice for one thing.
(What each field may be by itself is in `validation_rules`.)

Three policies take part: behaviour (sampled the tokens), anchor (the ratio is taken against it),
policy (is trained). policy / anchor is the ratio, anchor / behaviour the weight; each of the two
must be corrected for once.
"""

from __future__ import annotations

from torchtitan_rl.config import LossConfig


def loss_mistakes(config: LossConfig, *, staleness: int) -> list[str]:
    """One message per mistake: field, value, fix. ``staleness`` is `ScheduleConfig.staleness`."""
    return [*_corrections(config, staleness), *_lengths(config)]


def _corrections(config: LossConfig, staleness: int) -> list[str]:
    mistakes = []
    if config.anchor == "behaviour" and config.weight != "none":
        mistakes.append(
            f"trainer.loss.weight is {config.weight}: with anchor behaviour the ratio already is "
            "policy / behaviour, and a weight would correct twice; give none, or anchor recomputed"
        )
    if config.anchor == "interpolated" and staleness == 0:
        mistakes.append(
            "trainer.loss.anchor is interpolated: with schedule.staleness 0 no version lies "
            "between behaviour and policy; give recomputed or behaviour"
        )
    elif config.anchor != "behaviour" and config.weight == "none":
        mistakes.append(
            f"trainer.loss.anchor is {config.anchor}: without a weight nothing corrects for the "
            "policy that sampled the tokens; give weight token or sequence, or anchor behaviour"
        )
    if config.anchor == "recomputed" and config.ratio == "sequence":
        mistakes.append(
            "trainer.loss.ratio is sequence: with anchor recomputed every ratio is 1 and the "
            "choice would do nothing; give token, or weight sequence for sequence-level correction"
        )
    return mistakes


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
